"""The one launch of a decode step's attention against the op's meaning, and against the two launches it stands for."""

import pytest
import torch

from services.worker.kernels.impl.triton import _decode_attention
from services.worker.kernels.impl.triton.decode_attention import IMPL
from services.worker.kernels.ops.decode_attention import decode_attention, make_decode_case
from services.worker.kernels.ops.paged_attention import Extras
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)


@pytest.mark.parametrize("fused", [True, False])
def test_a_last_part_that_has_only_the_new_token(monkeypatch: pytest.MonkeyPatch, hold: Holder, fused: bool) -> None:
    """Parts of 16 tokens: contexts of 33 and 49 leave one in the last."""
    monkeypatch.setattr(_decode_attention, "places", lambda *_: 6)
    shape = _decode_attention.Shape(16, 4, 1, 1.0, fused)
    monkeypatch.setattr(_decode_attention, "choose", lambda *_: shape)
    _decode_attention._plan.cache_clear()
    cases = [
        make_decode_case("plain", [33, 49, 1], (6, 2, 64), 64, True),
        make_decode_case("extras", [33, 49, 17], (6, 2, 64), 64, True, Extras(window=40, softcap=2.0, sinks=True)),
    ]
    hold(IMPL, cases=cases)
    _decode_attention._plan.cache_clear()


def test_nothing_but_the_new_slots_is_written(device: torch.device) -> None:
    case = next(case for case in decode_attention.cases if case.name == "ragged")
    qkv, rotation, k_cache, v_cache, slots, norm, rows, spec = case.make(torch.float32)
    before = k_cache.clone(), v_cache.clone()
    moved = {name: getattr(rows, name).to(device) for name in ("query_starts", "context_lens", "block_tables")}
    rows = type(rows)(**moved, block_tokens=16, max_query=1, max_context=700, num_decode=len(qkv))
    k_cache, v_cache = k_cache.to(device), v_cache.to(device)
    norm = type(norm)(norm.q.to(device), norm.k.to(device), norm.eps)
    turned = tuple(part.to(device) for part in rotation)
    IMPL.run(qkv.to(device), turned, k_cache, v_cache, slots.to(device), norm, rows, spec)
    for cache, old in zip((k_cache, v_cache), before, strict=True):
        changed = (cache.cpu() != old).flatten(2).any(-1).flatten().nonzero().flatten()
        assert changed.tolist() == sorted(slots.tolist())
