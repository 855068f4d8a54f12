import json
import sys
from pathlib import Path

import pytest

from benchmarks import loading

SETTINGS = ["worker.device=cpu", "model.dtype=bfloat16", 'worker.kernels=["torch"]']


def test_a_small_checkpoint_is_written_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loading.json"
    settings = [f"--set={setting}" for setting in SETTINGS]
    given = ["--model=tiny-moe", "--layers=1", "--shard-gb=0.0003", f"--folder={tmp_path}", f"--json={path}"]
    monkeypatch.setattr(sys, "argv", ["loading", *given, *settings])
    loading.main()
    found = {result["name"]: result["value"] for result in json.loads(path.read_text())}
    assert found["loading_gbps"] > 0 and found["loading_one_thread_gbps"] > 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["loading.json"], "shards are removed"
