import json
import sys
from pathlib import Path

import pytest

from benchmarks import serve
from benchmarks.load import StreamResult
from benchmarks.report import GateRed
from benchmarks.workloads import Mix, Source

SETTINGS = ["worker.device=cpu", "worker.threads=1", 'worker.kernels=["torch"]', "kv.blocks=400"]


def test_a_tiny_model_is_served_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "serve.json"
    sizes = ["--concurrency=1,3", "--prompt=16", "--output=6", "--clients=2"]
    settings = [f"--set={setting}" for setting in SETTINGS]
    monkeypatch.setattr(sys, "argv", ["serve", "--model=tiny", *sizes, *settings, f"--json={path}"])
    serve.main()
    found = {result["name"]: result["value"] for result in json.loads(path.read_text())}
    for load in ("c1", "c3"):
        prefix = f"serve_tiny_random_{load}"
        assert found[f"{prefix}_output_tokens_per_s"] > 0
        assert found[f"{prefix}_ttft_ms_p50"] > 0 and found[f"{prefix}_itl_ms_p99"] >= 0
    assert found["serve_tiny_ready_s"] > 0


def test_missing_tokens_and_errors_turn_the_gate_red() -> None:
    asks = Source(1000).draw(Mix("random", 4, 3), 2)
    good = StreamResult(4, 3, 0.1, 0.2, 3)
    serve.check([good, good], asks)
    with pytest.raises(GateRed, match="6 tokens were asked for, 5 came"):
        serve.check([good, StreamResult(4, 2, 0.1, 0.2, 2)], asks)
    with pytest.raises(GateRed, match="1 of 2 requests failed; the first: refused"):
        serve.check([good, StreamResult(0, 0, 0.0, 0.1, 0, error="refused")], asks)
