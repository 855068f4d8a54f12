"""Who gets how much: pure functions of plain numbers, no state.

The planner calls them; another rule goes here and nowhere else. Keys are (priority, order of arrival), smaller is
sooner.
"""

from collections.abc import Iterable

from common.protocol import WorkerReady

Key = tuple[int, int]
# What a worker may say of itself: far more than any device has, and little enough for the tables that follow from it.
MOST = {"num_blocks": 1 << 24, "block_tokens": 4096, "vocab_size": 1 << 24, "max_model_len": 1 << 30}


def rows_allowed(max_rows: int, step_tokens: int, worker_rows: int) -> int:
    """Rows that may run at once. Every row must fit a step with one token, so the step's budget bounds them too."""
    return min(max_rows, step_tokens, worker_rows)


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


def absurd(ready: WorkerReady) -> str:
    """What a worker says of itself that cannot be, or "": its figures size tables here."""
    figures = {name: (getattr(ready.model, name), most) for name, most in MOST.items()}
    figures["max_rows"] = ready.max_rows, MOST["num_blocks"]
    wrong = [f"{name} is {found}" for name, (found, most) in figures.items() if not 1 <= found <= most]
    return ", ".join(wrong)
