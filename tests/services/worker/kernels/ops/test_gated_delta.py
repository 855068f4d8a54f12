"""gated_delta against the recurrence token by token, and its state in pieces against the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.kernels.ops.causal_conv import make_state_rows
from services.worker.kernels.ops.gated_delta import DeltaShape, gated_delta, make_delta_case
from services.worker.kernels.ops.gated_rms_norm import gated_rms_norm
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.outcome import convert


def formula(
    qkv: Tensor, gates: Tensor, decay: Tensor, bias: Tensor, state: Tensor, blocks: Tensor, rows: AttentionRows
) -> tuple[Tensor, Tensor]:
    """In float64, one head and one token at a time. Returns the result and the new state."""
    state = state.clone()
    _, value_heads, key_dim, value_dim = state.shape
    share = value_heads // qkv.shape[1]
    out = torch.empty(len(qkv), value_heads, value_dim, dtype=torch.float64)
    for row, block in enumerate(blocks.tolist()):
        begin, end = rows.query_starts[row : row + 2].tolist()
        if 0 < end - begin == rows.context_lens[row]:
            state[block] = 0
        for token, head in ((t, h) for t in range(begin, end) for h in range(value_heads)):
            group, place = divmod(head, share)
            q, k, v = qkv[token, group].split([key_dim, key_dim, share * value_dim])
            q, k, v = q / (q @ q + 1e-6).sqrt(), k / (k @ k + 1e-6).sqrt(), v.view(share, value_dim)[place]
            beta = 1 / (1 + (-gates[token, group, place]).exp())
            rate = (1 + (gates[token, group, share + place] + bias[head]).exp()).log()
            held = state[block, head] * (-decay[head] * rate).exp()
            held = held + torch.outer(k, beta * (v - k @ held))
            out[token, head], state[block, head] = q @ held / key_dim**0.5, held
    return out, state


# those with drafts: tests/services/worker/layers/test_delta_net.py
PLAIN = [case for case in gated_delta.cases if "drafts" not in case.name]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_equals_formula(case: Any) -> None:
    for dtype in gated_delta.tolerances:
        *floats, state, blocks, rows = case.make(dtype)[:7]
        wanted, kept = formula(*(part.double() for part in floats), state.double(), blocks, rows)
        got = gated_delta.meaning(*floats, state, blocks, rows)
        assert got.dtype == dtype and state.dtype == torch.float32
        limit = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
        torch.testing.assert_close(got.double(), wanted, rtol=limit, atol=max(limit / 2, 2e-5))
        torch.testing.assert_close(state.double(), kept, rtol=2e-5, atol=2e-5)


NORMED = [case for case in gated_delta.cases if case.name.startswith("normed")]


@pytest.mark.parametrize("case", NORMED, ids=lambda case: case.name)
def test_with_a_norm_it_is_the_rule_and_then_the_norm(case: Any) -> None:
    *arguments, past, norm = case.make(torch.float32)
    before = convert((arguments, past), torch.clone)
    got = gated_delta.meaning(*arguments, past, norm)
    bare = gated_delta.meaning(*before[0], before[1])
    torch.testing.assert_close(got, gated_rms_norm.meaning(bare, *norm))
    assert torch.equal(arguments[4], before[0][4])


def test_pieces_are_the_whole_and_other_blocks_stay() -> None:
    *floats, state, _, _ = make_delta_case("", [150], [0], DeltaShape(2, 2, 16, 16)).make(torch.float32)
    qkv, gates, decay, bias = floats
    before, whole = state.clone(), state.clone()
    wanted = gated_delta.meaning(*floats, whole, *make_state_rows([150], [0], [2]))
    done, parts = 0, []
    for count in (1, 63, 1, 70, 15):
        span = slice(done, done + count)
        blocks, rows = make_state_rows([count], [done], [2])
        parts.append(gated_delta.meaning(qkv[span], gates[span], decay, bias, state, blocks, rows))
        done += count
    torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[2], whole[2], rtol=1e-5, atol=1e-5)
    assert torch.equal(state[:2], before[:2])


def test_keys_that_are_all_alike_stay_exact() -> None:
    """The system of a chunk is as far from diagonal as it can be."""
    *floats, state, blocks, rows = make_delta_case("", [128], [0], DeltaShape(1, 1, 16, 16)).make(torch.float32)
    qkv, gates, decay, bias = floats
    qkv[:, :, 16:32] = 1.0
    gates[..., 0], gates[..., 1] = 30.0, -30.0  # nothing is forgotten, all is corrected
    wanted, _ = formula(*(part.double() for part in (qkv, gates, decay, bias)), state.double(), blocks, rows)
    got = gated_delta.meaning(qkv, gates, decay, bias, state, blocks, rows)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
