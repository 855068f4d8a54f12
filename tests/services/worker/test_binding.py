"""What is bound after a test, from what is known, and without one."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common import config as configuration
from common.columns import pack_i32, unpack_i32
from common.protocol import Progress, RowStart, Sampling, StepPlan
from services.worker import binding
from services.worker.binding import Bench, bind_tested, content_of, shapes_of, with_right_sums
from services.worker.kernels import registry
from services.worker.kernels.ops.all_reduce import all_reduce
from services.worker.kernels.ops.all_reduce_add_norm import all_reduce_add_norm
from services.worker.kernels.ops.linear import linear
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.real_cases import SHAPES
from services.worker.kernels.registry import Impl
from services.worker.model_engine import ModelEngine, facts_of
from services.worker.self_test import Job, NotTested, SelfTest, Verdict
from services.worker.shares import Rank
from tests.services.worker.rogue_kernels import rogues

CPU = torch.device("cpu")
SCRIPT = Path(__file__).with_name("rogue_kernels.py")
ON = configuration.load(None, ["worker.self_test=on", 'worker.kernels=["triton", "torch"]'])


class Answers:
    """In place of the child processes."""

    def __init__(self, *verdicts: Verdict, problem: str = "") -> None:
        self.jobs: list[Job] = []
        self._verdicts, self._problem = verdicts, problem

    def __call__(self, job: Job, report: Callable[[str, int], None]) -> tuple[Verdict, ...]:
        self.jobs.append(job)
        if self._problem:
            raise NotTested(self._problem)
        report("triton linear", 1)
        return self._verdicts


class OnlyOnce(Answers):
    def __call__(self, job: Job, report: Callable[[str, int], None]) -> tuple[Verdict, ...]:
        if self.jobs:
            raise NotTested("no process")
        return super().__call__(job, report)


@pytest.fixture(autouse=True)
def _rogues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_for", rogues("linear=faults,rms_norm"))


@pytest.fixture
def spec(make_tiny: Callable[[str], Any]) -> Any:
    return make_tiny("qwen3").decoder.spec


FAULT = (
    Verdict("", "triton"),
    Verdict("linear", "triton", "ends by SIGSEGV in case x", 3),
    Verdict("rms_norm", "triton"),
)


def bound(spec: Any, bench: Bench, config: Any = ON) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    facts, heard = facts_of(CPU, torch.float32, spec, 16, torch.float32), []  # type: ignore[var-annotated]
    bindings, _ = bind_tested(config, facts, spec, 0, bench, lambda what, done: heard.append((what, done)))
    return {row.op: row for row in bindings.table}, heard


def test_what_failed_is_dropped_and_the_second_start_tests_nothing(spec: Any, tmp_path: Path) -> None:
    tester = Answers(*FAULT)
    table, heard = bound(spec, Bench(CPU, tmp_path, test=tester))
    assert (table["linear"].provider, table["rms_norm"].provider) == ("torch", "triton")
    assert table["linear"].reason == "triton: ends by SIGSEGV in case x" and heard == [("triton linear", 1)]
    job = tester.jobs[0]
    assert (job.priority, job.device, job.dtype, job.captures) == (("triton", "torch"), "cpu", "float32", False)
    assert job.shapes["hidden_size"] == spec.hidden_size and job.shapes["block_tokens"] == 16
    again = Answers(problem="must not be asked")
    table, heard = bound(spec, Bench(CPU, tmp_path, test=again))
    assert table["linear"].provider == "torch" and again.jobs == [] == heard
    anew = Answers(*FAULT)
    bound(spec, Bench(CPU, tmp_path, test=anew, again=True))
    assert len(anew.jobs) == 1


def test_ops_that_the_model_does_not_call_are_tried_for_whoever_asks(spec: Any, tmp_path: Path) -> None:
    """Only those, under a key of their own: what a worker's start finds stays what it was."""
    tester = Answers(*FAULT)
    bound(spec, Bench(CPU, tmp_path, test=tester, uncalled=True))
    called, others = tester.jobs
    assert "uncalled" not in called.shapes and called.verdicts == ()
    assert others.shapes == {**called.shapes, "uncalled": 1}
    assert others.verdicts == FAULT[:2], "rms_norm had no case"
    worker = Answers(problem="must not be asked")
    bound(spec, Bench(CPU, tmp_path, test=worker))
    assert worker.jobs == []
    table, _ = bound(spec, Bench(CPU, tmp_path, test=OnlyOnce(*FAULT), again=True, uncalled=True))
    assert table["linear"].provider == "torch", "the first answer counts where the second process fails"


def test_another_content_is_tested_anew(spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound(spec, Bench(CPU, tmp_path, test=Answers(*FAULT)))
    other = configuration.load(
        None, ["worker.self_test=on", 'worker.kernels=["triton", "torch"]', "scheduler.max_rows=7"]
    )
    tester = Answers(*FAULT)
    bound(spec, Bench(CPU, tmp_path, test=tester), other)
    assert len(tester.jobs) == 1
    monkeypatch.setattr(binding, "content_key", lambda arch, content: "kernels have changed")
    bound(spec, Bench(CPU, tmp_path, test=tester))
    assert len(tester.jobs) == 2


def test_a_test_that_cannot_run_is_no_verdict(spec: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table, _ = bound(spec, Bench(CPU, tmp_path, test=Answers(problem="no process")))
    assert table["linear"].provider == "triton" and "kernels are not tested: no process" in caplog.text
    assert not (tmp_path / "self-test").exists()


class Alone:
    """A group's words, and what it finds out about sums."""

    rank = Rank(0, 2)

    def __init__(self, right: bool) -> None:
        self.right, self.tried = right, []  # type: ignore[var-annotated]

    def sums_rightly(self, run: Callable[[torch.Tensor], None], dtype: torch.dtype, width: int) -> bool:
        self.tried.append((run, dtype, width))
        return self.right

    norms_rightly = sums_rightly


@pytest.mark.parametrize(("right", "kept"), [(True, "triton"), (False, "torch")])
def test_sums_over_ranks_that_are_wrong_are_dropped(
    spec: Any, monkeypatch: pytest.MonkeyPatch, right: bool, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    def summed(x: torch.Tensor) -> None: ...

    def normed(share: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...  # type: ignore[empty-body]

    impls = {
        "all_reduce": Impl(all_reduce, "triton", summed),
        "all_reduce_add_norm": Impl(all_reduce_add_norm, "triton", normed),
    }
    monkeypatch.setattr(registry, "find_for", lambda facts, provider: (impls, ""))
    facts = facts_of(CPU, torch.float32, spec, 16, torch.float32)
    first, group = registry.bind(("triton", "torch"), facts), Alone(right)
    bindings = with_right_sums(ON, facts, 0, first, (), group)  # type: ignore[arg-type]
    assert bindings.provider(all_reduce) == bindings.provider(all_reduce_add_norm) == kept
    assert group.tried == [(run, torch.float32, spec.hidden_size) for run in (summed, normed)]
    assert ("its sums over 2 ranks are wrong" in caplog.text) is not right
    again = with_right_sums(ON, facts, 0, registry.bind(("torch",), facts), (), group)  # type: ignore[arg-type]
    assert again.provider(all_reduce) == "torch" and len(group.tried) == 2, "the group's own need no trial"


def test_off_on_a_cpu_unless_asked(spec: Any, tmp_path: Path) -> None:
    tester = Answers(*FAULT)
    config = configuration.load(None, ['worker.kernels=["triton", "torch"]'])
    table, _ = bound(spec, Bench(CPU, tmp_path, test=tester), config)
    assert tester.jobs == [] and table["linear"].provider == "triton"


def test_shapes(make_tiny: Callable[[str], Any]) -> None:
    moe = make_tiny("qwen3_moe").decoder.spec
    shapes = shapes_of(ON, moe)
    assert set(shapes) <= set(SHAPES) and (shapes["num_experts"], shapes["top_k"], shapes["expert_size"]) == (6, 3, 40)
    assert shapes["intermediate_size"] == 0
    mixed = shapes_of(ON, make_tiny("qwen3_moe_mixed").decoder.spec)
    assert mixed["intermediate_size"] == 80 and mixed["num_experts"] == 6
    job = Job(("torch",), "cpu", "", "float32", {})
    assert content_of(job, CPU)["units"] == 0 and linear is not rms_norm


def test_a_whole_engine_serves_without_the_kernel_that_faults(
    make_tiny: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Real child processes: the kernel would end this very process if the engine called it."""
    tiny, folder = make_tiny("qwen3"), tmp_path / "model"
    tiny.reference.save_pretrained(folder)
    command = [sys.executable, "-P", str(SCRIPT), "linear=faults,rms_norm"]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setattr(binding, "SelfTest", partial(SelfTest, command=command))
    settings = [f"model.source={folder}", "model.dtype=float32", "worker.device=cpu", f"worker.cache_dir={tmp_path}"]
    settings += ["worker.self_test=on", 'worker.kernels=["triton", "torch"]', "kv.blocks=40", "scheduler.max_rows=2"]
    stages: list[Progress] = []
    engine = ModelEngine(configuration.load(None, settings), stages.append)
    assert "self-test" in {stage.stage for stage in stages}
    assert "dropped: linear by triton: ends by SIGSEGV in case" in caplog.text
    prompt = list(range(5, 25))
    row = RowStart(1, 9, pack_i32(prompt), 20, 0, pack_i32(range(2)), Sampling(4, temperature=0.0))
    plan = StepPlan(
        1, added=[row], slots=pack_i32([1]), positions=pack_i32([0]), counts=pack_i32([20]), samples=b"\x01"
    )
    assert list(unpack_i32(engine.execute(plan).tokens())) == tiny.greedy(prompt, 1)
