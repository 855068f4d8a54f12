"""The command as a user runs it: tables or JSON, and the exit status; --prebuild where nothing can be built."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = [sys.executable, "-P", "-m", "valence", "doctor"]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "COLUMNS": "160"}
    return subprocess.run([*SCRIPT, *arguments], capture_output=True, text=True, check=False, env=environment)


def test_a_cpu_is_well(tmp_path: Path) -> None:
    """The real self-test of Numba's kernels at the bundled model's shapes; the second time nothing is tested."""
    settings = ["--device", "cpu", "--set", f"worker.cache_dir={tmp_path}", "--set", f"links.run_dir={tmp_path}/run"]
    first = run("--json", *settings)
    told = json.loads(first.stdout)
    rows = {row["op"]: row for row in told["ops"]}
    assert told["ok"] and first.returncode == 0, told["findings"]  # this host may have warnings of its own
    assert rows["paged_attention"]["provider"] == "numba" and rows["paged_attention"]["tested"] == "5 cases right"
    assert len(list((tmp_path / "self-test").iterdir())) == 2  # of the ops that the model calls, and of the others
    second = run(*settings)
    assert second.returncode == 0 and "5 cases right" in second.stdout and "✗" not in second.stdout


def test_what_is_wrong_is_the_exit_status(tmp_path: Path) -> None:
    done = run("--no-test", "--model", "/nowhere/at/all", "--set", f"worker.cache_dir={tmp_path}")
    assert done.returncode == 1 and "✗ no model at /nowhere/at/all" in done.stdout and "Traceback" not in done.stderr


def test_prebuild_says_why_it_cannot(tmp_path: Path) -> None:
    done = run("--prebuild", "gfx942", "--set", f"worker.cache_dir={tmp_path}")
    assert (
        done.returncode == 78
        and done.stderr == "valence: AITER is not installed here: run this in the worker's image\n"
    )
    assert "no architecture 'gfx1100'" in run("--prebuild", "gfx1100").stderr
