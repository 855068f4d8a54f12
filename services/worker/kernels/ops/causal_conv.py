"""A short causal convolution of each channel by itself, then SiLU, over the rows of a step (Mamba's; Qwen3-Next's).

What a row needs of the tokens before this step's lies in its state block: the last W - 1 inputs. As in every op that
keeps a state, `rows` says which tokens belong to which row (not where pages are), and `blocks`, int64 [R], which block
is whose: distinct, but for rows that pad a step. A row without tokens changes nothing, and one all of whose context is
in this step starts from zero, whatever its block holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.paged_attention import AttentionRows, make_attention_rows
from services.worker.kernels.registry import Case, Tolerance, op

MOST_ROWS = 16  # of a self-test's steps: a model's state may have megabytes a row and layer


class Chunk(NamedTuple):
    """A row with more than one token: tokens begin .. end - 1 of the step, and its state block."""

    begin: int
    end: int
    block: int
    is_first: bool  # nothing of the row was computed before: its state is zero, whatever the block holds


class Singles(NamedTuple):
    """Rows of one token each: the tokens, their state blocks, both int64 [n], and which rows start, bool [n]."""

    tokens: Tensor
    blocks: Tensor
    is_first: Tensor


def state_parts(blocks: Tensor, rows: AttentionRows) -> tuple[Singles, tuple[Chunk, ...]]:
    """The torch meanings' plan of a step (off a CPU this waits for the device). blocks: int64 [R]."""
    starts, context = rows.query_starts.cpu().numpy(), rows.context_lens.cpu().numpy()
    held, counts = blocks.cpu().numpy(), np.diff(starts)
    first = counts == context
    single = np.flatnonzero(counts == 1)
    device = blocks.device
    columns = (starts[single].astype(np.int64), held[single], first[single])
    chunks = (
        Chunk(int(starts[row]), int(starts[row + 1]), int(held[row]), bool(first[row]))
        for row in np.flatnonzero(counts > 1)
    )
    return Singles(*(torch.from_numpy(column).to(device) for column in columns)), tuple(chunks)


def make_state_rows(
    counts: Sequence[int], before: Sequence[int], blocks: Sequence[int]
) -> tuple[Tensor, AttentionRows]:
    """`blocks` and `rows` of an op, from plain numbers; `before`: tokens of each row that earlier steps computed."""
    context = [b + c for b, c in zip(before, counts, strict=True)]
    return torch.tensor(blocks, dtype=torch.int64), make_attention_rows(counts, context, [[]] * len(counts), 16)


def spread_blocks(num_rows: int) -> list[int]:
    """A state block for each row, in no order, of num_rows + 2."""
    return torch.randperm(num_rows + 2, generator=torch.Generator().manual_seed(num_rows)).tolist()[:num_rows]


def make_conv_case(name: str, counts: Sequence[int], before: Sequence[int], shape: tuple[int, int, int]) -> Case:
    """shape: heads, channels of a head, taps."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        heads, channels, taps = shape
        generator = torch.Generator().manual_seed(sum(counts) + heads)
        # columns of a projection that has others behind each head
        wide = torch.randn(sum(counts), heads, channels + 5, generator=generator)
        weight = torch.randn(heads * channels, taps, generator=generator) / taps**0.5
        state = torch.randn(len(counts) + 2, taps - 1, heads * channels, generator=generator)
        rows = make_state_rows(counts, before, spread_blocks(len(counts)))
        return wide.to(dtype)[..., :channels], weight.to(dtype), state.to(dtype), *rows

    return Case(name, make)


@op(
    cases=[
        make_conv_case("decode", [1, 1, 1, 1], [5, 0, 2, 1], (2, 24, 4)),
        make_conv_case("prompt", [70], [0], (3, 16, 4)),
        make_conv_case("mixed", [1, 1, 2, 35, 0, 1, 3], [9, 0, 1, 64, 0, 3, 0], (2, 40, 4)),
        make_conv_case("short", [2, 1, 5], [7, 3, 0], (1, 8, 2)),
        make_conv_case("empty", [], [], (2, 16, 4)),
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

    x: [T, H, G], last dimension dense; weight: [H * G, W]; state: [blocks, W - 1, H * G], each row's last inputs, the
    oldest first, changed in place; all of one dtype. The sum is in fp32.
    """
    num_tokens, heads, channels = x.shape
    taps, flat = weight.shape[1], x.reshape(num_tokens, heads * channels)
    out = torch.empty_like(flat)
    singles, chunks = state_parts(blocks, rows)
    if len(singles.tokens):
        held = state.index_select(0, singles.blocks).masked_fill_(singles.is_first[:, None, None], 0)
        inputs = torch.cat((held, flat.index_select(0, singles.tokens)[:, None]), 1)
        out[singles.tokens] = functional.silu((inputs.float() * weight.T.float()).sum(1)).to(x.dtype)
        state.index_copy_(0, singles.blocks, inputs[:, 1:])
    for begin, end, block, is_first in chunks:
        held = torch.zeros_like(state[block]) if is_first else state[block]
        inputs = torch.cat((held, flat[begin:end]))
        sums = functional.conv1d(inputs.T.float()[None], weight.float()[:, None], groups=heads * channels)
        out[begin:end] = functional.silu(sums[0].T).to(x.dtype)
        state[block] = inputs[len(inputs) - taps + 1 :]
    return out.view(x.shape)


def model_cases(shapes: Mapping[str, int], sizes: Any) -> Iterator[Case]:
    """At a model's own sizes, for the self-test at start."""
    if shapes.get("delta_heads"):
        heads, values = shapes["delta_heads"], shapes["delta_value_heads"] // shapes["delta_heads"]
        shape = heads, 2 * shapes["delta_key_dim"] + values * shapes["delta_value_dim"], shapes["delta_taps"]
        for name, counts, before in state_steps(sizes):
            yield make_conv_case(name, counts, before, shape)


def state_steps(sizes: Any) -> Iterator[tuple[str, list[int], list[int]]]:
    """Names, counts and tokens before of the steps that a self-test runs."""
    for rows in sorted({min(rows, MOST_ROWS) for rows in sizes.decode}):
        yield f"decode{rows}", [1] * rows, [3 * row for row in range(rows)]
    for tokens in sizes.prompt:
        yield f"prompt{tokens}", [tokens], [0]
        yield f"mixed{tokens}", [1, 1, tokens, 3], [7, 0, 77, 0]
