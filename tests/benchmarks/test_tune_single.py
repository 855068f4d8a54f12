"""The tuner of a layer's chain: what it runs is a layer, what it keeps is faster and the same; times need a GPU."""

from typing import Any

import pytest
import torch

from benchmarks.shapes import ModelShape
from tests.conftest import HAS_GPU, interpreted

with interpreted():  # its kernels are those of other tests in this process
    from benchmarks import kernel_work, tune_single
    from benchmarks.tune_single import Chain, improved, joined
    from services.worker.kernels.impl.triton._decode_attention import Shape
    from services.worker.kernels.impl.triton._moe_plan import Experts

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
TINY = ModelShape("tiny", 2, 64, 2, 1, 32, 64, 64, qk_norm=True)
MIXED = ModelShape("mixed", 2, 64, 2, 1, 32, 32, 64, experts=4, top_k=2)
SHAPES = (Shape(32, 2, 1, 1.0), Shape(64, 2, 1, 1.0, early=True))


def short(stage: tune_single.Stage) -> tune_single.Stage:
    """With two candidates, which differ."""
    first = stage.plans[0]
    if hasattr(first, "block_n"):
        return stage._replace(plans=(first, first._replace(block_n=first.block_n // 2)))
    return stage._replace(plans=SHAPES if stage.name == "paged_attention" else stage.plans[:2])


@pytest.mark.parametrize(("model", "form"), [(TINY, "rows"), (MIXED, "")])
def test_what_is_faster_and_the_same_is_kept(monkeypatch: pytest.MonkeyPatch, model: ModelShape, form: str) -> None:
    monkeypatch.setattr(kernel_work, "DEVICE", DEVICE)
    monkeypatch.setitem(tune_single.MIXTURES, "mixed", Experts(4, 2, 64, 32))
    monkeypatch.setattr(tune_single, "CONTEXT", 64)
    took: dict[tuple[Any, ...], float] = {}

    def time(chain: Chain, plans: tuple[Any, ...]) -> float:
        """Whatever was not asked for yet is faster than all before."""
        return took.setdefault(plans, 1.0 / (1 + len(took)))

    monkeypatch.setattr(Chain, "time", time)
    with interpreted():
        chain = Chain(model, form, DEVICE, 1)
        chain.stages = tuple(short(stage) for stage in chain.stages)
        first = tuple(stage.plans[0] for stage in chain.stages)
        start = chain.run(first).clone()
        kept = improved(chain, lambda number, plan: True, lambda plan: plan != SHAPES[1], lambda: 1.0)
        assert kept != first and all(
            plan == stage.plans[-1] for stage, plan in zip(chain.stages, kept, strict=True) if plan not in SHAPES
        ), "each later one is faster"
        assert SHAPES[0] in kept, "the other is faster here and does not fit"
        torch.testing.assert_close(chain.run(kept), start, rtol=0.05, atol=0.1 * float(start.float().std()))
        assert start.isfinite().all() and float(start.float().std()) > 0
    rows = joined([stage.row(plan) for stage, plan in zip(chain.stages, kept, strict=True) if stage.row])
    assert set(rows) == {"paged_attention", "moe_gated", "norm_linear", "add_linear"} if model.experts else rows
    assert all(set(tune_single.SAME[op]) <= set(row) for op, found in rows.items() for row in found)


def test_a_choice_that_computes_something_else_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_work, "DEVICE", DEVICE)
    monkeypatch.setattr(tune_single, "CONTEXT", 32)
    monkeypatch.setattr(Chain, "time", lambda chain, plans: 1.0 if plans[0] == "wrong" else 2.0)
    with interpreted():
        chain = Chain(TINY, "", DEVICE, 1)
        product = chain.stages[0]

        def launch(plan: Any, layer: int) -> None:
            product.launch(product.plans[0], layer)
            if plan == "wrong":
                chain.qkv.mul_(2)

        others = tuple(stage._replace(plans=stage.plans[:1]) for stage in chain.stages[1:])
        chain.stages = (product._replace(plans=("right", "wrong"), launch=launch), *others)
        assert improved(chain, lambda number, plan: True, lambda plan: True, lambda: 1.0)[0] == "right"
