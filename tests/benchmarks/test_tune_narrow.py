"""The tuner's own rules, and that what it holds a candidate against is the product; what it measures needs a GPU."""

import pytest
import torch

from tests.conftest import HAS_GPU, interpreted

with interpreted():  # its kernels are those of other tests in this process
    from benchmarks import tune_narrow
    from benchmarks.tune_narrow import GROUPED, STANDS_FOR, Job, Operands, candidates, jobs, kernel_key
    from benchmarks.tuning import merged
    from services.worker.kernels.impl.triton._dense import Device
    from services.worker.kernels.impl.triton._narrow_plan import WIDE, Plan, geometry, rule


def test_each_job_has_the_rules_choice_first_and_few_others() -> None:
    plans = {job: candidates(job, Device()) for job in jobs()}
    for job, found in plans.items():
        how = geometry if job.grouped else rule
        own = how(*tune_narrow.asked(job, job.rows), Device())
        assert found[0] == (own._replace(parts=1) if job.grouped else own) and len(set(found)) == len(found)
        assert not job.experts or all(plan.block_m == job.rows for plan in found)
    assert {job.rows for job in plans if not job.grouped} == set(STANDS_FOR)
    assert {job.rows for job in plans if job.grouped} == set(GROUPED)
    assert any(WIDE in found for job, found in plans.items() if job.form == "blocks" and not job.rounded)
    kernels = {kernel_key(job, plan) for job, found in plans.items() for plan in found}
    assert len(kernels) < 1400, "14 processes compiled 713 and measured them in 76 s"


@pytest.mark.parametrize(
    "job",
    [
        Job("int4z", False, 1, 64, 256, gated=True, normed=True),
        Job("rows", False, 1, 64, 256, gated=True, experts=4, top_k=2),
        Job("mxfp4", False, 1, 64, 256, experts=4),
    ],
)
def test_a_candidate_is_held_against_the_product(job: Job) -> None:
    operands = Operands(job, torch.device("cuda" if HAS_GPU else "cpu"), 0)
    with interpreted():
        assert operands.holds(Plan(1, 8, 256, 1)) and operands.bytes > 0
        assert job.form == "rows" or operands.holds(Plan(1, 8, 256, 1, dots=True))
        operands.wide = 2 * operands.wide
        assert not operands.holds(Plan(1, 8, 256, 1))


def test_a_candidate_for_sorted_pairs_is_held_against_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tune_narrow.TOKENS, 16, 24)
    job = Job("mxfp4", False, 16, 32, 256, gated=True, experts=4, top_k=2)
    with interpreted():
        operands = Operands(job, torch.device("cuda" if HAS_GPU else "cpu"), 0)
        assert operands.holds(Plan(16, 32, 128)) and operands.bytes > 0
        operands.wide = 2 * operands.wide
        assert not operands.holds(Plan(16, 32, 128))


@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_a_candidate_is_not_blamed_for_the_rounding_of_x(form: str) -> None:
    operands = Operands(Job(form, True, 32, 128, 256, gated=True), torch.device("cuda" if HAS_GPU else "cpu"), 0)
    operands.x = torch.zeros_like(operands.x)  # it is not what is multiplied
    with interpreted():
        assert operands.holds(Plan(32, 64, 128))


def test_rows_of_other_runs_stay() -> None:
    old = [{"rows": 1, "us": 3.0}, {"rows": 2, "us": 4.0}]
    assert merged(old, [{"rows": 2, "us": 1.0}], ("rows",)) == [old[0], {"rows": 2, "us": 1.0}]
