"""How many blocks a sequence needs in each group: the arithmetic that worker and scheduler share. Pure."""

from collections.abc import Sequence

from common.protocol import KvGroup, ModelFacts

STATE_BLOCKS = 2  # a live one, and the checkpoint that it may be copied from


def first_block(group: KvGroup, position: int, block_tokens: int) -> int:
    """The first block that a token at `position` reads, of a group with pages."""
    return max(position - group.window + 1, 0) // block_tokens if group.kind == "window" else 0


def window_blocks(window: int, chunk: int, block_tokens: int) -> int:
    """The most blocks of a window that a row holds when it computes `chunk` tokens in a step, or one in each."""
    return -(-(window - 1 + max(chunk, block_tokens)) // block_tokens) + 1


def needs(groups: Sequence[KvGroup], num_pools: int, tokens: int, block_tokens: int) -> list[int]:
    """Blocks of each pool without which a sequence of `tokens` tokens cannot run, in however small chunks."""
    found = [0] * num_pools
    blocks = -(-tokens // block_tokens)
    for group in groups:
        if group.kind == "state":
            found[group.pool] += STATE_BLOCKS
        elif group.kind == "window":
            found[group.pool] += min(blocks, window_blocks(group.window, 0, block_tokens))
        else:
            found[group.pool] += blocks
    return found


def longest(groups: Sequence[KvGroup], pools: Sequence[int], most: int, block_tokens: int) -> int:
    """Tokens, at most `most`, that one sequence may have in pools of so many blocks when it runs alone."""
    low, high = 0, -(-most // block_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        needed = needs(groups, len(pools), middle * block_tokens, block_tokens)
        fits = all(need <= blocks for need, blocks in zip(needed, pools, strict=True))
        low, high = (middle, high) if fits else (low, middle - 1)
    return min(low * block_tokens, most)


def longest_of(model: ModelFacts) -> int:
    """The same of a worker."""
    groups = model.groups or (KvGroup("full"),)
    return longest(groups, (model.num_blocks, *model.pools), model.max_model_len, model.block_tokens)
