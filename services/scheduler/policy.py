"""Who gets how much: pure functions of plain numbers, no state.

The planner calls them; another rule goes here and nowhere else. A key orders the sequences of one tenant by priority
and arrival, a rank those of all tenants; smaller is sooner.
"""

import math
from collections.abc import Iterable

from common.kv_needs import longest_of
from common.pooling import Embedding, Pooling
from common.protocol import ModelFacts, WorkerReady

Key = tuple[float, int]
Rank = tuple[float, int, Key]  # what the tenant was served, its number, key
I32_MAX = 2**31 - 1
LEVELS = 100  # priorities beyond -100 and 100 count as these, so that whatever waits is next within a known time
# What a worker may say of itself: far more than any device has, and little enough for the tables that follow from it.
MOST = {"num_blocks": 1 << 24, "block_tokens": 4096, "vocab_size": 1 << 24, "max_model_len": 1 << 30}
MOST_DRAFTS = 8

MOST_GROUPS = 64


def key(priority: int, now_s: float, ageing_s: float, arrival: int) -> Key:
    """Where a sequence that arrives now stands in its tenant's queue.

    A level of priority is worth `ageing_s` of waiting. All that wait grow older together, so the order of any two
    never changes, and the time of arrival says it all. 0: priorities are absolute, and may starve others for ever.
    """
    if not ageing_s:
        return priority, arrival
    return min(max(priority, -LEVELS), LEVELS) + now_s / ageing_s, arrival


def waiting_tokens(max_waiting_tokens: int, step_tokens: int) -> int:
    """Prompt tokens that may wait; by default those of 512 full steps."""
    return max_waiting_tokens or 512 * step_tokens


def rows_allowed(max_rows: int, step_tokens: int, worker_rows: int) -> int:
    """Rows that may run at once. Every row must fit a step with one token, so the step's budget bounds them too."""
    return min(max_rows, step_tokens, worker_rows)


def chunk(pending: int, budget: int, chunk_tokens: int) -> int:
    """Tokens that a row with `pending` uncomputed tokens gets from what is left of the step's budget."""
    most = min(pending, budget)
    return min(most, chunk_tokens) if chunk_tokens else most


def chunk_cost(count: int, context: int, parity: int) -> float:
    """What `count` tokens after `context` others cost, in tokens without any; `parity` as in ModelFacts, 0: unknown.

    Each passes the weights, and attends to all before it.
    """
    return count * (1 + (context + count / 2) / parity) if parity else float(count)


def affordable(cost: float, context: int, parity: int) -> int:
    """The most tokens after `context` others that cost no more: chunk_cost solved for its count. At least 1."""
    if not parity or cost == math.inf:
        return max(int(min(cost, I32_MAX)), 1)
    linear = 1 + context / parity
    # The root of count^2 / (2 parity) + linear * count = cost, in the form that does not cancel.
    return max(int(2 * cost / (linear + math.sqrt(linear * linear + 2 * cost / parity))), 1)


def step_cost(tokens: int, chunk_context: int, parity: int) -> float:
    """What chunks of together `tokens` beside decoding rows may cost; these wait for them."""
    return chunk_cost(tokens, chunk_context, parity) if chunk_context and parity else math.inf


def beside_tokens(step_tokens: int, chunk_beside: int, decoding: int, filling: int) -> int:
    """Tokens of chunks in a step in which `decoding` rows decode while `filling` sequences are, or could be, filled.

    Both sides wait for the step, so its budget is shared by their numbers; `chunk_beside` at least, 0: no such limit.
    """
    if not (chunk_beside and decoding):
        return step_tokens
    return min(max(chunk_beside, step_tokens * filling // (filling + decoding)), step_tokens)


def length_limit(num_prompt: int, max_tokens: int, longest: int) -> int:
    """Prompt and output tokens at which a sequence ends with LENGTH.

    Without any output, of a prompt that is pooled, it is one that never comes.
    """
    return min(num_prompt + max_tokens, longest) if max_tokens else min(num_prompt, longest) + 1


def can_pool(pooling: Pooling, embedding: Embedding) -> bool:
    """Whether a model gives such a vector."""
    return 0 < (pooling.dimensions or embedding.size) <= embedding.size


def spare_blocks(num_blocks: int) -> int:
    """Blocks that an admission leaves free for the growth of running rows, so that it is not preempted at once."""
    return num_blocks // 100


def may_admit(needed: int, free: int, num_blocks: int, running: int, ahead: int = 0) -> bool:
    """Whether a waiting sequence may take `needed` of `free` blocks. With nothing running it may take the last one.

    `ahead`: blocks by which all grow until its first token is known. Without them it may be preempted before, and two
    sequences whose ranks change with what their tenants are served could take each other's blocks for ever.
    """
    spare = max(spare_blocks(num_blocks), ahead) if running else 0
    return needed + spare <= free


def victim(requester: Rank, others: Iterable[Rank]) -> Rank:
    """Who gives its blocks up for `requester`: the last in the order of service, which may be the requester itself.

    That is the newest and least urgent row of the tenant that was served most.

    A row that would be admitted again before the requester is never the victim.
    """
    return max(requester, max(others, default=requester))


def absurd(ready: WorkerReady) -> str:
    """What a worker says of itself that cannot be, or "": its figures size tables here."""
    figures = {name: (getattr(ready.model, name), most) for name, most in MOST.items()}
    figures["max_rows"] = ready.max_rows, MOST["num_blocks"]
    figures["attention_parity"] = ready.model.attention_parity or 1, MOST["max_model_len"]
    figures["drafts"] = ready.model.drafts or 1, MOST_DRAFTS
    figures["draft_rows"] = ready.model.draft_rows or 1, MOST["num_blocks"]
    wrong = [f"{name} is {found}" for name, (found, most) in figures.items() if not 1 <= found <= most]
    return ", ".join(wrong) or _absurd_groups(ready.model)


def _absurd_groups(model: ModelFacts) -> str:
    """The same of its groups and pools; the scheduler's tables are indexed by them."""
    pools, block_tokens = (model.num_blocks, *model.pools), model.block_tokens
    if len(model.groups) > MOST_GROUPS or not all(1 <= blocks <= MOST["num_blocks"] for blocks in pools):
        return f"{len(model.groups)} groups in pools of {pools} blocks"
    if model.groups and {group.pool for group in model.groups} != set(range(len(pools))):
        return f"{len(pools)} pools, of which its groups use others"
    if model.groups and (model.groups[0].kind == "state" or model.groups[0].pool):
        return "its first group has no pages in the first pool"
    for group in model.groups:
        if group.kind == "window" and not 1 <= group.window <= MOST["max_model_len"]:
            return f"a window of {group.window} tokens"
        if group.kind == "state" and (group.every < 1 or group.every % block_tokens):
            return f"checkpoints every {group.every} tokens, with blocks of {block_tokens}"
    return "" if longest_of(model) else f"no room for a token in pools of {pools} blocks"
