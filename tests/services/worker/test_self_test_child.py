"""The child's own decisions; what becomes of it when a kernel ends it is in test_self_test.py."""

import msgspec
import pytest
import torch

from services.worker.kernels import registry
from services.worker.kernels.ops.norm_linear import make_norm_linear_case
from services.worker.kernels.ops.paged_attention import make_attention_case
from services.worker.self_test import AGAIN, Begun, Job, Verdict
from services.worker.self_test_child import NOTHING, is_decode, judge, run
from tests.services.worker.rogue_kernels import made, rogues

JOB = Job(("triton", "torch"), "cpu", "", "float32", {})


def test_tells_before_and_after_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_for", rogues("rms_norm,linear=wrong"))
    told: list[msgspec.Struct] = []
    assert run(JOB, told.append) == 0
    assert told[:3] == [Begun("", "triton", "import"), Verdict("", "triton"), NOTHING]
    first = told.index(Begun("linear", "triton", "1x576x960"))
    assert isinstance(told[first + 1], Verdict) and "wrong in case 1x576x960" in told[first + 1].reason
    assert told[-1] == Verdict("rms_norm", "triton", "", 4)


def test_what_cannot_be_bound_is_left_to_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_for", rogues("rms_norm"))
    assert run(Job(("triton",), "cpu", "", "float32", {}), lambda message: None) == 0


def test_a_kernel_that_raises_on_a_gpu_may_have_broken_its_context() -> None:
    facts = JOB.facts()
    raising = made("linear", "raises")
    assert judge(raising, facts, torch.device("cpu"), JOB, lambda message: None)[1] is False
    assert judge(made("linear", "wrong"), facts, torch.device("cpu"), JOB, lambda message: None)[1] is False
    assert AGAIN not in (0, 1)


def test_an_op_of_whole_numbers_is_tested_in_its_own_dtype() -> None:
    job = Job(("triton", "torch"), "cpu", "", "bfloat16", {})
    verdict, _ = judge(made("gather_tokens", ""), job.facts(), torch.device("cpu"), job, lambda message: None)
    assert verdict == Verdict("gather_tokens", "triton", "", 4)


def test_what_is_of_a_decode_step() -> None:
    job = Job(("torch",), "cuda", "gfx942", "bfloat16", {"max_rows": 64, "step_tokens": 512})
    assert is_decode(make_norm_linear_case(64, 32, 48), job) and is_decode(make_norm_linear_case(1, 32, 48), job)
    assert not is_decode(make_norm_linear_case(512, 32, 48), job)
    assert is_decode(make_attention_case("decode16", [1], [3], (2, 1, 8)), job)
    assert not is_decode(make_attention_case("prompt64", [64], [64], (2, 1, 8)), job)


def test_what_fails_before_the_kernel_runs_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that another process has for itself, say."""

    def busy(*arguments: object) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr("services.worker.kernels.trial.make_arguments", busy)
    told: list[msgspec.Struct] = []
    with pytest.raises(RuntimeError, match="busy"):
        judge(made("linear", ""), JOB.facts(), torch.device("cpu"), JOB, told.append)
    assert told == [NOTHING]
