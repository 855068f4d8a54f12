"""A short causal convolution of each channel by itself, then SiLU, over the rows of a step (Mamba's; Qwen3-Next's).

What a row needs of the tokens before this step's lies in its state block: the last W - 1 inputs. As in every op that
keeps a state, `rows` says which tokens belong to which row (not where pages are), and `blocks`, int64 [R], which block
is whose: distinct, but for rows that pad a step. A row without tokens changes nothing, and one all of whose context is
in this step starts from zero, whatever its block holds. A row with drafts has an entry for its newest token and one for
each draft, all of one block; what comes of drafts is no state yet but lies beside it (`rows.drafts`, ADR 0039).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.draft_entries import DraftEntries
from services.worker.kernels.ops.paged_attention import AttentionRows, make_attention_rows
from services.worker.kernels.registry import Case, Sizes, Tolerance, op

MOST_ROWS = 16  # of a self-test's steps: a model's state may have megabytes a row and layer


class Chunk(NamedTuple):
    """A row with more than one token: tokens begin .. end - 1 of the step, and its state block."""

    begin: int
    end: int
    block: int
    is_first: bool  # nothing of the row was computed before: its state is zero, whatever the block holds


class Later(NamedTuple):
    """Drafts at one distance: which of Singles have one, and the tokens, both int64 [m]."""

    rows: Tensor
    tokens: Tensor


class Singles(NamedTuple):
    """Rows of one token each, and drafts behind it: the tokens, their state blocks, both int64 [n], and which rows
    start, bool [n]."""

    tokens: Tensor
    blocks: Tensor
    is_first: Tensor
    positions: Tensor  # int64 [n], of the tokens
    held: Tensor  # int64 [n], as in DraftEntries
    later: tuple[Later, ...]  # by distance, from 1 on


def state_parts(blocks: Tensor, rows: AttentionRows) -> tuple[Singles, tuple[Chunk, ...]]:
    """The torch meanings' plan of a step (off a CPU this waits for the device). blocks: int64 [R]."""
    starts, context = rows.query_starts.cpu().numpy(), rows.context_lens.cpu().numpy()
    numbers, counts = blocks.cpu().numpy(), np.diff(starts)
    first = counts == context
    offsets = held = np.zeros(len(counts), np.int64)
    if rows.drafts is not None:
        offsets, slots, each = (column.cpu().numpy() for column in rows.drafts)
        held = each[slots]
    single = np.flatnonzero((counts == 1) & (offsets <= 0))
    columns = (starts[single], numbers[single], first[single], context[single] - 1, held[single])
    drafts = np.flatnonzero(offsets > 0)
    rows_of = np.searchsorted(single, drafts) - 1
    later = [(rows_of[offsets[drafts] == i], starts[drafts[offsets[drafts] == i]]) for i in range(1, _most(offsets))]
    chunks = (
        Chunk(int(starts[row]), int(starts[row + 1]), int(numbers[row]), bool(first[row]))
        for row in np.flatnonzero(counts > 1)
    )

    def put(column: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(column if column.dtype == np.bool_ else column.astype(np.int64)).to(blocks.device)

    tokens, blocks_of, is_first, positions, kept = map(put, columns)
    behind = tuple(Later(put(which), put(places)) for which, places in later)
    return Singles(tokens, blocks_of, is_first, positions, kept, behind), tuple(chunks)


def _most(offsets: npt.NDArray[Any]) -> int:
    return int(offsets.max(initial=0)) + 1


class Spread(NamedTuple):
    """Rows of a case: those with drafts have one token besides."""

    drafts: Sequence[int]
    held: Sequence[int]


def make_state_rows(
    counts: Sequence[int], before: Sequence[int], blocks: Sequence[int], spread: Spread | None = None
) -> tuple[Tensor, AttentionRows]:
    """`blocks` and `rows` of an op, from plain numbers; `before`: tokens of each row that earlier steps computed."""
    if spread is None:
        context = [b + c for b, c in zip(before, counts, strict=True)]
        return torch.tensor(blocks, dtype=torch.int64), make_attention_rows(counts, context, [[]] * len(counts), 16)
    entries = [(row, place) for row, drafts in enumerate(spread.drafts) for place in range(drafts + 1)]
    alone = [counts[row] for row, _ in entries]
    places = [before[row] + place for row, place in entries]
    numbers, rows = make_state_rows(alone, places, [blocks[row] for row, _ in entries])
    offsets = torch.tensor([place if counts[row] == 1 else -1 for row, place in entries], dtype=torch.int32)
    slots = torch.tensor([row for row, _ in entries], dtype=torch.int32)
    held = torch.tensor(spread.held, dtype=torch.int32)
    return numbers, replace(rows, drafts=DraftEntries(offsets, slots, held))


def spread_blocks(num_rows: int) -> list[int]:
    """A state block for each row, in no order, of num_rows + 2."""
    return torch.randperm(num_rows + 2, generator=torch.Generator().manual_seed(num_rows)).tolist()[:num_rows]


def make_conv_case(
    name: str,
    counts: Sequence[int],
    before: Sequence[int],
    shape: tuple[int, int, int],
    spread: Spread | None = None,
    ahead: int = 0,
) -> Case:
    """shape: heads, channels of a head, taps; ahead: the most drafts of a row."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        heads, channels, taps = shape
        generator = torch.Generator().manual_seed(sum(counts) + heads)
        # columns of a projection that has others behind each head
        tokens = sum(counts) + sum(spread.drafts if spread is not None else ())
        wide = torch.randn(tokens, heads, channels + 5, generator=generator)
        weight = torch.randn(heads * channels, taps, generator=generator) / taps**0.5
        state = torch.randn(len(counts) + 2, taps - 1 + ahead, heads * channels, generator=generator)
        rows = make_state_rows(counts, before, spread_blocks(len(counts)), spread)
        return wide.to(dtype)[..., :channels], weight.to(dtype), state.to(dtype), *rows

    return Case(name, make)


@op(
    cases=[
        make_conv_case("decode", [1, 1, 1, 1], [5, 0, 2, 1], (2, 24, 4)),
        make_conv_case("prompt", [70], [0], (3, 16, 4)),
        make_conv_case("mixed", [1, 1, 2, 35, 0, 1, 3], [9, 0, 1, 64, 0, 3, 0], (2, 40, 4)),
        make_conv_case("short", [2, 1, 5], [7, 3, 0], (1, 8, 2)),
        make_conv_case("empty", [], [], (2, 16, 4)),
        make_conv_case("drafts", [1, 1, 1, 1], [5, 0, 9, 3], (2, 24, 4), Spread([2, 3, 0, 3], [1, 0, 3, 0]), 3),
        make_conv_case("drafts_chunk", [1, 1, 6, 1], [5, 8, 2, 0], (1, 8, 2), Spread([0, 0, 0, 0], [2, 1, 0, 0]), 2),
    ],
    tolerances={
        torch.float32: Tolerance(4e-6, 4e-6, "order of four products"),
        torch.bfloat16: Tolerance(1.6e-2, 1e-2, "one rounding to 8 bits"),
        torch.float16: Tolerance(2e-3, 1e-3, "one rounding to 11 bits"),
    },
    writes=("state",),
)
def causal_conv(x: Tensor, weight: Tensor, state: Tensor, blocks: Tensor, rows: AttentionRows) -> Tensor:
    """silu(sum over w of weight[c, w] * x[t - W + 1 + w, c]) along each row's tokens. Returns a new [T, H, G].

    x: [T, H, G], last dimension dense; weight: [H * G, W]; state: [blocks, W - 1 + A, H * G], each row's last inputs,
    the oldest first, then those of up to A drafts, changed in place; all of one dtype. The sum is in fp32. Of a row
    whose last drafts held, so many more inputs count as the last.
    """
    num_tokens, heads, channels = x.shape
    taps, flat = weight.shape[1], x.reshape(num_tokens, heads * channels)
    before = taps - 1
    out = torch.empty_like(flat)
    singles, chunks = state_parts(blocks, rows)
    if len(singles.tokens):
        places = singles.held[:, None] + torch.arange(before, device=x.device)
        held = state[singles.blocks[:, None], places].masked_fill_(singles.is_first[:, None, None], 0)
        inputs = torch.cat((held, flat.index_select(0, singles.tokens)[:, None]), 1)
        out[singles.tokens] = functional.silu((inputs.float() * weight.T.float()).sum(1)).to(x.dtype)
        state[singles.blocks, :before] = inputs[:, 1:]
        for place, (which, tokens) in enumerate(singles.later, before):
            added = flat.index_select(0, tokens)
            shifted = torch.cat((inputs[which, 1:], added[:, None]), 1)
            out[tokens] = functional.silu((shifted.float() * weight.T.float()).sum(1)).to(x.dtype)
            state[singles.blocks[which], place] = added
            inputs[which] = shifted
    for begin, end, block, is_first in chunks:
        held = torch.zeros_like(state[block, :before]) if is_first else state[block, :before]
        inputs = torch.cat((held, flat[begin:end]))
        sums = functional.conv1d(inputs.T.float()[None], weight.float()[:, None], groups=heads * channels)
        out[begin:end] = functional.silu(sums[0].T).to(x.dtype)
        state[block, :before] = inputs[len(inputs) - before :]
    return out.view(x.shape)


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """At a model's own sizes, for the self-test at start."""
    if shapes.get("delta_heads"):
        heads, values = shapes["delta_heads"], shapes["delta_value_heads"] // shapes["delta_heads"]
        shape = heads, 2 * shapes["delta_key_dim"] + values * shapes["delta_value_dim"], shapes["delta_taps"]
        ahead = shapes.get("delta_drafts", 0)
        for name, counts, before in state_steps(sizes):
            yield make_conv_case(name, counts, before, shape, ahead=ahead)
        if ahead:
            yield make_conv_case("drafts", *drafts_step(ahead), shape, drafts_spread(ahead), ahead)


def state_steps(sizes: Sizes) -> Iterator[tuple[str, list[int], list[int]]]:
    """Names, counts and tokens before of the steps that a self-test runs."""
    for rows in sorted({min(rows, MOST_ROWS) for rows in sizes.decode}):
        yield f"decode{rows}", [1] * rows, [3 * row for row in range(rows)]
    for tokens in sizes.prompt:
        yield f"prompt{tokens}", [tokens], [0]
        yield f"mixed{tokens}", [1, 1, tokens, 3], [7, 0, 77, 0]


def drafts_step(ahead: int) -> tuple[list[int], list[int]]:
    """Counts and tokens before of a step with drafts, for a self-test."""
    return [1] * (ahead + 1), [7 + 3 * row for row in range(ahead + 1)]


def drafts_spread(ahead: int) -> Spread:
    return Spread(range(ahead + 1), range(ahead, -1, -1))
