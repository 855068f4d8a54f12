"""The table of ops as a worker would bind them, with what a self-test said."""

from pathlib import Path

from common import config as configuration
from services.worker.kernels.registry import Binding, all_ops
from services.worker.self_test import Verdict
from valence.doctor import Host, judge
from valence.doctor_ops import said, with_ops

HOST = Host(system={}, versions={})


def test_the_bundled_model_on_this_cpu(tmp_path: Path) -> None:
    settings = ["worker.device=cpu", f"worker.cache_dir={tmp_path}", 'worker.kernels=["torch"]']
    host = with_ops(HOST, configuration.load(None, settings), tests=True, again=False, report=lambda what, done: None)
    assert [row.op for row in host.ops] == list(all_ops()) and {row.provider for row in host.ops} == {"torch"}
    assert host.model == "SmolLM2-135M-Instruct on the CPU, activations float32, KV cache float32"
    assert judge(host) == []


def test_what_cannot_be_bound_is_a_finding() -> None:
    config = configuration.load(None, ["model.source=/nowhere/at/all", "worker.device=cpu"])
    host = with_ops(HOST, config, tests=False, again=False, report=lambda what, done: None)
    assert "no model at /nowhere/at/all" in host.ops_trouble and host.ops == ()
    config = configuration.load(None, ["worker.device=cuda"])
    assert "sees no GPU" in with_ops(HOST, config, False, False, lambda what, done: None).ops_trouble
    config = configuration.load(None, ['worker.kernels=["aiter"]', "worker.device=cpu"])
    assert "no provider can run it" in with_ops(HOST, config, False, False, lambda what, done: None).ops_trouble


def test_what_the_test_said() -> None:
    verdicts = [
        Verdict("linear", "aiter", "", 12),
        Verdict("rope", "aiter", "", 0),
        Verdict("linear", "triton", "x", 3),
    ]
    assert said(Binding("linear", "aiter", ""), verdicts) == "12 cases right"
    assert said(Binding("rope", "aiter", ""), verdicts) == "no case of this model"
    assert said(Binding("rope", "triton", ""), verdicts) == "not tested"
    assert said(Binding("rope", "torch", ""), verdicts) == "is the meaning"
