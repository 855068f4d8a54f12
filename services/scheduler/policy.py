"""Who gets how much: pure functions of plain numbers, no state.

The planner calls them; another rule goes here and nowhere else. Keys are (priority, order of arrival), smaller is
sooner.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

Key = tuple[int, int]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator allows. Raises ValueError for values that cannot work."""

    token_budget: int = 2048  # tokens of one step, all rows together
    max_rows: int = 256  # rows of one step
    chunk_tokens: int = 0  # most tokens of one row in one step; 0 is no limit of its own
    plans_in_flight: int = 2
    max_waiting: int = 4096  # sequences in the queue, beyond which requests are refused
    max_worker_deaths: int = 2  # a sequence that ran in so many deaths is ended
    policy: Literal["decode_first", "prefill_first"] = "decode_first"
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_rows", "plans_in_flight", "max_waiting", "max_worker_deaths"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.chunk_tokens < 0:
            raise ValueError(f"chunk_tokens must not be negative, not {self.chunk_tokens}")


def rows_allowed(limits: Limits, worker_rows: int) -> int:
    """Rows that may run at once. Every row must fit a step with one token, so the token budget bounds them too."""
    return min(limits.max_rows, limits.token_budget, worker_rows)


def chunk(pending: int, budget: int, chunk_tokens: int) -> int:
    """Tokens that a row with `pending` uncomputed tokens gets from what is left of the step's budget."""
    most = min(pending, budget)
    return min(most, chunk_tokens) if chunk_tokens else most


def longest_sequence(max_model_len: int, num_blocks: int, block_tokens: int) -> int:
    """Tokens that one sequence may have when it runs alone: bounded by the model and by the KV blocks that exist."""
    return min(max_model_len, num_blocks * block_tokens)


def length_limit(num_prompt: int, max_tokens: int, longest: int) -> int:
    """Prompt and output tokens at which a sequence ends with LENGTH."""
    return min(num_prompt + max_tokens, longest)


def spare_blocks(num_blocks: int) -> int:
    """Blocks that an admission leaves free for the growth of running rows, so that it is not preempted at once."""
    return num_blocks // 100


def may_admit(needed: int, free: int, num_blocks: int, running: int) -> bool:
    """Whether a waiting sequence may take `needed` of `free` blocks. With nothing running it may take the last one."""
    spare = spare_blocks(num_blocks) if running else 0
    return needed + spare <= free


def victim(requester: Key, others: Iterable[Key]) -> Key:
    """Who gives its blocks up for `requester`: the least urgent, newest of all, which may be the requester itself.

    A row that would be admitted again before the requester is never the victim.
    """
    return max(requester, max(others, default=requester))
