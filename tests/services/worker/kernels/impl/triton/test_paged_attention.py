"""The Triton implementation of paged_attention, both its kernels, against the op's meaning."""

import pytest
import torch

from services.worker.kernels.impl.triton.paged_attention import IMPL
from services.worker.kernels.ops.paged_attention import (
    AttentionSpec,
    Extras,
    make_attention_case,
    make_attention_rows,
    paged_attention,
)
from tests.services.worker.kernels.impl.triton.hold import Holder

CASES = {case.name: case for case in paged_attention.cases}


@pytest.mark.parametrize("name", CASES)
def test_is_the_meaning(hold: Holder, name: str) -> None:
    hold(IMPL, cases=[CASES[name]])


@pytest.mark.parametrize("extras", [Extras(value_dim=16), Extras(value_dim=40, window=20, sinks=True)])
def test_values_of_their_own_size_and_scale(hold: Holder, extras: Extras) -> None:
    hold(IMPL, cases=[make_attention_case("values", [1, 1, 20], [300, 7, 90], (4, 2, 48), extras=extras)])


@pytest.mark.parametrize("extras", [Extras(fp8=2), Extras(16, 40, 2.0, sinks=True, fp8=2)])
def test_scales_of_each_token_and_head(hold: Holder, extras: Extras) -> None:
    hold(IMPL, cases=[make_attention_case("each", [1, 1, 20], [70, 5, 50], (6, 2, 48), extras=extras)])


def test_decode_rows_may_also_be_served_as_chunks(device: torch.device) -> None:
    """num_decode says how many first rows are known to have one token; others may have one too."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 32, generator=generator).to(device)
    cache = torch.randn(2, 3, 16, 1, 32, generator=generator).to(device)
    rows = make_attention_rows([1, 1, 1], [5, 16, 1], [[0], [1], [2]], 16)
    got = []
    for num_decode in (3, 1, 0):
        moved = {name: getattr(rows, name).to(device) for name in ("query_starts", "context_lens", "block_tables")}
        part = type(rows)(**moved, block_tokens=16, max_query=1, max_context=16, num_decode=num_decode)
        got.append(IMPL.run(q, cache[0], cache[1], part, AttentionSpec(0.2)))
    torch.testing.assert_close(got[1], got[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[2], got[0], rtol=1e-5, atol=1e-5)
