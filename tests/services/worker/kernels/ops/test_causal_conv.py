"""causal_conv against a loop over tokens, and its state in pieces against the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.kernels.ops.causal_conv import causal_conv, make_conv_case, make_state_rows
from services.worker.kernels.ops.paged_attention import AttentionRows


def formula(x: Tensor, weight: Tensor, state: Tensor, blocks: Tensor, rows: AttentionRows) -> tuple[Tensor, Tensor]:
    """Token by token, in float64. Returns the result and the new state."""
    out, state = torch.empty(len(x), x[0].numel() if len(x) else 0, dtype=torch.float64), state.clone()
    for row, block in enumerate(blocks.tolist()):
        begin, end = rows.query_starts[row : row + 2].tolist()
        if begin == end:
            continue
        held = (
            list(state[block])
            if rows.context_lens[row] > end - begin
            else [torch.zeros_like(state[0, 0])] * len(state[block])
        )
        for token in range(begin, end):
            held.append(x[token].reshape(-1))
            summed = sum(weight[:, -1 - back] * held[-1 - back] for back in range(weight.shape[1]))
            out[token] = torch.nn.functional.silu(torch.as_tensor(summed))
        state[block] = torch.stack(held[-len(state[block]) :])
    return out.view(x.shape), state


# those with drafts: tests/services/worker/layers/test_delta_net.py
PLAIN = [case for case in causal_conv.cases if "drafts" not in case.name]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_equals_formula(case: Any) -> None:
    for dtype, tolerance in causal_conv.tolerances.items():
        x, weight, state, blocks, rows = case.make(dtype)
        wanted, kept = formula(x.double(), weight.double(), state.double(), blocks, rows)
        got = causal_conv.meaning(x, weight, state, blocks, rows)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute)
        assert torch.equal(state.double(), kept), "inputs are kept as they are"


def test_pieces_are_the_whole_and_other_blocks_stay() -> None:
    x, weight, state, _, _ = make_conv_case("", [30], [0], (2, 12, 4)).make(torch.float32)
    whole, before = causal_conv.meaning(x, weight, state.clone(), *make_state_rows([30], [0], [1])), state.clone()
    done, parts = 0, []
    for count in (2, 1, 1, 20, 6):
        parts.append(causal_conv.meaning(x[done : done + count], weight, state, *make_state_rows([count], [done], [1])))
        done += count
    torch.testing.assert_close(torch.cat(parts), whole)
    assert torch.equal(state[[0, 2]], before[[0, 2]]) and torch.equal(state[1], x[27:].flatten(1))
