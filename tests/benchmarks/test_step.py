import json
import sys
from pathlib import Path

import pytest

from benchmarks import step

SETTINGS = ["worker.device=cpu", "worker.threads=1", 'worker.kernels=["torch"]', "kv.blocks=400"]


def test_a_tiny_model_runs_through_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json"
    sizes = ["--batches=1,3", "--prompt=20", "--output=6", "--prefill", "2", "40", "--max-len=512"]
    settings = [f"--set={setting}" for setting in SETTINGS]
    monkeypatch.setattr(sys, "argv", ["step", "--model=tiny", *sizes, *settings, f"--json={path}"])
    step.main()
    found = {result["name"]: result["value"] for result in json.loads(path.read_text())}
    wanted = {"batch_1", "batch_1_first_token", "3_sequences", "3_sequences_decode_step", "prefill_2_x_40", "start-up"}
    assert set(found) == {f"step_tiny_{name}" for name in wanted}
    assert all(value > 0 for value in found.values())
