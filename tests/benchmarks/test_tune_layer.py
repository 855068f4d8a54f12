"""The tuner of a layer's chain: what it runs is a layer, what it keeps is faster and the same; times need a GPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.shapes import ModelShape
from tests.conftest import HAS_GPU, interpreted

with interpreted():  # its kernels are those of other tests in this process
    from benchmarks import kernel_work, layer_stages, tune_layer
    from benchmarks.layer_chain import Chain
    from benchmarks.layer_stages import ASKED, Stage, Way
    from benchmarks.tune_layer import Link, Search, joined, near
    from services.worker.kernels.impl.triton._decode_attention import Shape
    from services.worker.kernels.impl.triton._dense import APART, Plan
    from services.worker.kernels.impl.triton._moe_plan import default_grouped

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
TINY = ModelShape("tiny", 2, 64, 2, 1, 32, 64, 64, qk_norm=True)
MIXED = ModelShape("mixed", 2, 64, 2, 1, 32, 32, 64, experts=4, top_k=2)
SHAPES = (Shape(32, 2, 1, 1.0), Shape(64, 2, 1, 1.0))
SMALL = Plan("matrix", 32, 64)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_work, "DEVICE", DEVICE)
    monkeypatch.setattr(layer_stages, "CONTEXT", 32)
    # interpreted products of bf16 are none
    monkeypatch.setattr(layer_stages, "DTYPE", torch.bfloat16 if HAS_GPU else torch.float32)


def short(stage: Stage) -> Stage:
    """With two candidates, which differ."""
    first = stage.plans[0]
    if stage.name == "paged_attention":
        return stage._replace(plans=SHAPES, around=lambda _: ())
    if isinstance(first, Way) and stage.name.startswith("norm"):
        return stage._replace(plans=(Way(SMALL), Way(APART, SMALL)))
    if hasattr(first, "block_n"):
        return stage._replace(plans=(first, first._replace(block_n=first.block_n // 2)))
    return stage._replace(plans=stage.plans[:2])


def never_late() -> float:
    return 1.0


def search(chain: Chain, fits: Callable[[Any], bool] = lambda _: True) -> Search:
    return Search(chain, lambda stage, plan: True, fits, never_late)


@pytest.mark.parametrize(("model", "form", "rows"), [(MIXED, "rows", 1), (TINY, "", 4), (MIXED, "", 4)])
def test_what_is_faster_and_the_same_is_kept(
    monkeypatch: pytest.MonkeyPatch, model: ModelShape, form: str, rows: int
) -> None:
    if rows > 1:
        monkeypatch.setattr(layer_stages._moe_plan, "choose", lambda *_: default_grouped(16, DEVICE))
    took: dict[tuple[Any, ...], float] = {}

    def time(chain: Chain, plans: tuple[Any, ...]) -> float:
        """Whatever was not asked for yet is faster than all before."""
        return took.setdefault(plans, 1.0 / (1 + len(took)))

    monkeypatch.setattr(Chain, "time", time)
    monkeypatch.setattr(tune_layer, "ROUNDS", 1)
    with interpreted():
        chain = Chain(model, form, rows, DEVICE, 1)
        chain.stages = tuple(short(stage) for stage in chain.stages)
        found = search(chain, lambda plan: plan != SHAPES[1])
        assert all(each.isfinite().all() and float(each.float().std()) > 0 for each in found.wanted)
        found.run()
        plans = dict(zip([stage.name for stage in chain.stages], found.plans, strict=True))
        assert plans.pop("paged_attention") == SHAPES[0], "the other is faster here and does not fit"
        assert [plan == stage.plans[-1] for stage, plan in zip(chain.stages, found.plans, strict=True)].count(
            False
        ) == 1
    rows_of = joined(found.lines())
    wanted = {"narrow"} if form else {"norm_linear", "linear"} if rows > 1 else set()
    wanted |= {"moe_gated"} if model.experts else {"norm_gated_linear"} if not form and rows > 1 else set()
    assert wanted <= set(rows_of) and all(set(ASKED[op]) <= set(row) for op, held in rows_of.items() for row in held)
    if model.experts:
        (row,) = rows_of["moe_gated"]
        assert len(row["few"]) == 7 if rows == 1 else {"block_m", "up", "down"} <= set(row)


def test_a_choice_that_computes_something_else_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chain, "time", lambda chain, plans: 1.0 if plans[0] == "wrong" else 2.0)
    with interpreted():
        chain = Chain(TINY, "", 1, DEVICE, 1)
        product = chain.stages[0]

        def launch(plan: Any, layer: int) -> None:
            product.launch(product.plans[0], layer)
            if plan == "wrong":
                chain.flow.qkv.mul_(2)

        chain.stages = (product._replace(plans=("right", "wrong"), launch=launch),)
        found = search(chain)
        found.run()
        assert found.plans[0] == "right"


def test_gains_that_do_not_show_again_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"lucky": iter([0.9, 1.0]), "slow": iter([1.1])}
    stage = Stage("x", ("first", "lucky", "slow"), lambda plan, layer: None, lambda plan: plan)
    monkeypatch.setattr(Chain, "__init__", lambda self: None)
    monkeypatch.setattr(Chain, "result", lambda self, plans: [])
    monkeypatch.setattr(Chain, "time", lambda self, plans: next(times[plans[0]]) if plans[0] in times else 1.0)
    chain = Chain()  # type: ignore[call-arg]
    chain.stages = (stage,)
    found = search(chain)
    found.run()
    assert found.plans == ("first",) and not found.lines()


def test_few_numbers_may_be_further_off_and_none_is_missing() -> None:
    wanted = torch.randn(1000, 1000)
    got = wanted + 0.01 * torch.randn(1000, 1000)
    assert near(got, wanted)
    got[0, :50] = 9.0
    assert near(got, wanted), "50 of a million"
    got[1, :80] = math.nan
    assert not near(got, wanted)


def test_each_kernel_is_compiled_once_and_a_step_reads_what_its_rows_reach() -> None:
    links = [Link(model, "", rows) for model in (TINY, MIXED) for rows in (16, 64)]
    with interpreted():
        chains = {link: Chain(*link, DEVICE, 1) for link in links}
    keys = [key for key, *_ in tune_layer.tasks_of({link: chain.stages for link, chain in chains.items()})]
    assert len(set(keys)) == len(keys) < sum(len(s.plans) for chain in chains.values() for s in chain.stages)
    read = [chains[link].read_bytes for link in links]
    assert read[0] == chains[links[0]].stored_bytes and read[0] < read[1], "each row has keys and values of its own"
    few = Chain(MIXED, "", 1, DEVICE, 1)
    # its second product reads the choice of experts without a wait of its own
    assert [stage.name for stage in few.stages if stage.relied_on] == ["experts up"]
    with pytest.raises(AssertionError, match="experts up"):
        few.run(tuple(stage.plans[0] for stage in few.stages), without=[s.relied_on for s in few.stages].index(True))
    assert few.read_bytes == few.stored_bytes - 2 * 3 * 64 * 32 * (MIXED.experts - MIXED.top_k)


def test_what_fits_no_other_chain_comes_last() -> None:
    plain, others = tune_layer.links((16, 1))
    assert {link.form for link in plain} == {""} and {link.rows for link in others} == {1, 16}
    assert [link.rows for link in others if link.form == "rows8"] == [1], "with more rows its lines are fp8's"
