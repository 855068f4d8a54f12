"""The gated delta rule over the rows of a step: linear attention whose state forgets, and corrects what it recalls.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024); by chunks (the UT transform) as in Yang et al., "Parallelizing
Linear Transformers with the Delta Rule over Sequence Length" (2024), section 3. The state of a head is a matrix [D, E].
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.causal_conv import (
    Spread,
    drafts_spread,
    drafts_step,
    make_state_rows,
    spread_blocks,
    state_parts,
    state_steps,
)
from services.worker.kernels.ops.gated_rms_norm import gated_rms_norm
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.registry import Case, Sizes, Tolerance, op

CHUNK = 64  # tokens whose corrections are solved for at once
L2_EPS = 1e-6


class DeltaShape(NamedTuple):
    """H key heads, each with `values` value heads; D numbers of a key, E of a value."""

    heads: int
    values: int
    key_dim: int
    value_dim: int


class Past(NamedTuple):
    """What rows keep of at most A drafts, at their position modulo 2A + 1, of qkv's dtype; G: D + V * E."""

    inputs: Tensor  # keys and values, [blocks, 2A + 1, H, G]
    gates: Tensor  # [blocks, 2A + 1, H, 2V]


class GatedNorm(NamedTuple):
    """Of gated_rms_norm, for what comes of the rule."""

    gate: Tensor  # [T, H, V * E], last dimension dense
    weight: Tensor  # [E]
    eps: float


def make_delta_case(
    name: str,
    counts: Sequence[int],
    before: Sequence[int],
    shape: DeltaShape,
    spread: Spread | None = None,
    ahead: int = 0,
    normed: bool = False,
) -> Case:
    """ahead: the most drafts of a row."""

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        heads, values, key_dim, value_dim = shape
        generator = torch.Generator().manual_seed(sum(counts) + heads)
        tokens = sum(counts) + sum(spread.drafts if spread is not None else ())
        value_heads = heads * values
        # keys with a common part, as a convolution's SiLU leaves them
        qkv = torch.randn(tokens, heads, 2 * key_dim + values * value_dim, generator=generator) + 0.5
        gates = torch.randn(tokens, heads, 2 * values + 3, generator=generator)
        decay = torch.rand(value_heads, generator=generator) * 4 + 0.02
        bias = torch.rand(value_heads, generator=generator) - 1.0
        state = torch.randn(len(counts) + 2, value_heads, key_dim, value_dim, generator=generator)
        rows = make_state_rows(counts, before, spread_blocks(len(counts)), spread)
        made = qkv.to(dtype), gates.to(dtype)[..., : 2 * values], decay, bias, state, *rows
        norm = None
        if normed:
            # columns of a projection that has others before
            gate = torch.randn(tokens, heads, values * value_dim + 8, generator=generator)
            norm = GatedNorm(
                gate.to(dtype)[..., 8:], (torch.rand(value_dim, generator=generator) + 0.5).to(dtype), 1e-6
            )
        if not ahead:
            return made if norm is None else (*made, None, norm)
        past = torch.randn(len(counts) + 2, 2 * ahead + 1, heads, key_dim + values * value_dim, generator=generator)
        past_gates = torch.randn(len(counts) + 2, 2 * ahead + 1, heads, 2 * values, generator=generator)
        return *made, Past((past + 0.5).to(dtype), past_gates.to(dtype)), norm

    return Case(name, make)


@op(
    cases=[
        make_delta_case("decode", [1, 1, 1], [5, 0, 80], DeltaShape(2, 2, 16, 32)),
        make_delta_case("prompt", [100], [0], DeltaShape(1, 2, 32, 16)),
        make_delta_case("mixed", [1, 1, 64, 0, 1, 70], [9, 0, 3, 0, 3, 0], DeltaShape(2, 1, 16, 16)),
        make_delta_case("odd", [3, 1, 17], [7, 4, 30], DeltaShape(1, 3, 24, 20)),
        make_delta_case("empty", [], [], DeltaShape(1, 2, 16, 16)),
        make_delta_case("normed_decode", [1, 1, 1], [5, 0, 80], DeltaShape(2, 2, 16, 48), normed=True),
        make_delta_case("normed_rows", [1] * 5, [5, 0, 80, 1, 2], DeltaShape(1, 2, 16, 16), normed=True),
        make_delta_case("normed_mixed", [1, 1, 40, 0, 1], [9, 0, 3, 0, 3], DeltaShape(1, 3, 24, 20), normed=True),
        make_delta_case(
            "drafts", [1] * 4, [5, 0, 9, 3], DeltaShape(2, 2, 16, 32), Spread([2, 3, 0, 3], [1, 0, 3, 0]), 3
        ),
        make_delta_case(
            "normed_drafts", [1, 1], [5, 9], DeltaShape(2, 2, 16, 32), Spread([2, 0], [1, 2]), 2, normed=True
        ),
        make_delta_case(
            "drafts_chunk", [1, 1, 6, 1], [5, 8, 2, 0], DeltaShape(1, 3, 24, 20), Spread([0] * 4, [2, 1, 0, 0]), 2
        ),
    ],
    tolerances={
        torch.float32: Tolerance(1e-4, 1e-4, "order of sums, over tokens of a chunk and of the state's rows"),
        torch.bfloat16: Tolerance(3e-2, 6e-2, "the state and the corrections rounded to 8 bits in products, or not"),
        torch.float16: Tolerance(4e-3, 1e-2, "the state and the corrections rounded to 11 bits in products, or not"),
    },
    writes=("state", "past"),
)
def gated_delta(
    qkv: Tensor,
    gates: Tensor,
    decay: Tensor,
    bias: Tensor,
    state: Tensor,
    blocks: Tensor,
    rows: AttentionRows,
    past: Past | None = None,
    norm: GatedNorm | None = None,
) -> Tensor:
    """S = a S + k (b (v - k^T a S))^T for each token of a row, then S^T q. Returns a new [T, H * V, E] of qkv's dtype.

    qkv: [T, H, 2D + V * E], contiguous: by key head its query, its key, then its V value heads; query and key are
    scaled to length 1, the query then by D ** -0.5. gates: [T, H, 2V], last dimension dense: V times g, V times h of
    b = sigmoid(g) and a = exp(-decay * softplus(h + bias)). decay, bias: float32 [H * V]; state: float32 [blocks,
    H * V, D, E], changed in place; blocks, rows: as in causal_conv. All in fp32. `past`, changed in place: what held of
    a row's drafts goes through the state before its next token. With `norm` the result is its gated_rms_norm.
    """
    _, value_heads, key_dim, value_dim = state.shape
    num_tokens, heads, _ = qkv.shape
    share = value_heads // heads

    def read(keys_and_values: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[n, H, D + V * E] and [n, H, 2V]: keys, values, how much is forgotten, how much corrected."""
        k, v = keys_and_values[..., :key_dim].float(), keys_and_values[..., key_dim:].float()
        strength, forgetting = (part.reshape(len(gates), value_heads) for part in torch.split(gates.float(), share, -1))
        log_decay = -decay * functional.softplus(forgetting + bias)
        heads_of = _unit(k).repeat_interleave(share, 1), v.reshape(len(gates), value_heads, value_dim)
        return *heads_of, log_decay, strength.sigmoid()

    q = _unit(qkv[..., :key_dim].float()).repeat_interleave(share, 1)
    inputs = (q * key_dim**-0.5, *read(qkv[..., key_dim:], gates))
    out = torch.empty(num_tokens, value_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    singles, chunks = state_parts(blocks, rows)
    if len(singles.tokens):
        held = state.index_select(0, singles.blocks).masked_fill_(singles.is_first[:, None, None, None], 0)
        if past is not None:
            for back in range(int(singles.held.max()), 0, -1):
                which = torch.nonzero(singles.held >= back)[:, 0]
                at = singles.blocks[which], (singles.positions[which] - back) % past.gates.shape[1]
                part, (k, *others) = held[which], read(past.inputs[at], past.gates[at])
                _one_token(part, k, k, *others)
                held[which] = part
        ones = (part.index_select(0, singles.tokens) for part in inputs)
        out[singles.tokens] = _one_token(held, *ones).to(out.dtype)
        state.index_copy_(0, singles.blocks, held)
        for distance, (which, tokens) in enumerate(singles.later, 1):
            assert past is not None, "drafts, and nowhere to keep them"
            at = singles.blocks[which], (singles.positions[which] + distance) % past.gates.shape[1]
            past.inputs[at], past.gates[at] = qkv[tokens][..., key_dim:], gates[tokens]
            part = held[which]
            out[tokens] = _one_token(part, *(each.index_select(0, tokens) for each in inputs)).to(out.dtype)
            held[which] = part
    for begin, end, block, is_first in chunks:
        held = torch.zeros_like(state[block]) if is_first else state[block]
        by_head = (part[begin:end].transpose(0, 1) for part in inputs)
        attended, state[block] = _many_tokens(held, *by_head)
        out[begin:end] = attended.transpose(0, 1).to(out.dtype)
    return out if norm is None else gated_rms_norm.meaning(out, *norm)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def _one_token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """q, k: [n, H, D]; v: [n, H, E]; the gates: [n, H]; state: [n, H, D, E], changed in place. Returns [n, H, E]."""
    state.mul_(log_decay.exp()[..., None, None])
    correction = (v - (k[..., None, :] @ state).squeeze(-2)) * beta[..., None]
    state.add_(k[..., None] * correction[..., None, :])
    return (q[..., None, :] @ state).squeeze(-2)


def _many_tokens(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """As _one_token for n tokens one after the other: q, k: [H, n, D]; the others alike; state: [H, D, E].

    Within a chunk each correction is what the state before the chunk and the corrections of earlier tokens leave: a
    triangular system. Returns [H, n, E] and the new state.
    """
    parts = []
    for begin in range(0, q.shape[1], CHUNK):
        span = slice(begin, begin + CHUNK)
        since = log_decay[:, span].cumsum(-1)  # of the decay since the chunk's begin
        between = (since[:, :, None] - since[:, None, :]).tril().exp().tril()
        weighted = k[:, span] * beta[:, span, None]
        system = weighted @ k[:, span].transpose(1, 2) * between
        wanted = v[:, span] * beta[:, span, None] - weighted * since.exp()[..., None] @ state
        corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        recalled = q[:, span] * since.exp()[..., None] @ state
        parts.append(recalled + q[:, span] @ k[:, span].transpose(1, 2) * between @ corrections)
        fading = (since[:, -1:] - since).exp()[..., None]
        state = state * since[:, -1].exp()[:, None, None] + (k[:, span] * fading).transpose(1, 2) @ corrections
    return torch.cat(parts, 1), state


def model_cases(shapes: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    """At a model's own sizes, for the self-test at start."""
    if shapes.get("delta_heads"):
        heads = shapes["delta_heads"]
        widths = shapes["delta_key_dim"], shapes["delta_value_dim"]
        shape = DeltaShape(heads, shapes["delta_value_heads"] // heads, *widths)
        ahead = shapes.get("delta_drafts", 0)
        for name, counts, before in state_steps(sizes):
            yield make_delta_case(name, counts, before, shape, ahead=ahead, normed=True)
        if ahead:
            yield make_delta_case("drafts", *drafts_step(ahead), shape, drafts_spread(ahead), ahead, normed=True)
