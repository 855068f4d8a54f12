"""Every kernel compiles for every target, and uses what the table beside the kernels says."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.aot import RESOURCES, Report, read_table, violations

ROOT = Path(__file__).resolve().parents[6]
COMMAND = ["-m", "benchmarks.kernels", "--compile-only", "gfx942,gfx950,sm_90", "--json"]
RENEW = f"Look at the difference that this makes: .venv/bin/python {' '.join(COMMAND)} {RESOURCES.relative_to(ROOT)}"


def named(reports: list[Report]) -> dict[str, Report]:
    return {f"{report.kernel} on {report.target}": report for report in reports}


def test_a_fresh_compile_gives_the_table(tmp_path: Path) -> None:
    """Another process compiles: this one interprets. Other versions of Triton are held to the limits only."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, *COMMAND, str(tmp_path / "fresh.json"), "--quick"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "fresh.json").exists(), run.stdout + run.stderr
    version, fresh = read_table((tmp_path / "fresh.json").read_text())
    assert not list(violations(fresh))
    assert run.returncode == 0, run.stderr
    kept_version, kept = read_table(RESOURCES.read_text())
    if version != kept_version:
        return
    now, was = named(fresh), named([row for row in kept if row.hot or row.target != "gfx950"])
    assert now.keys() == was.keys(), f"not in both: {', '.join(sorted(now.keys() ^ was.keys()))}. {RENEW}"
    for name, report in now.items():
        assert report == was[name], f"{name}: {report}\ninstead of {was[name]}. {RENEW}"


def test_the_table_is_of_the_pinned_version_and_within_the_limits() -> None:
    version, kept = read_table(RESOURCES.read_text())
    assert f"triton=={version}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert kept and not list(violations(kept))


def test_spills_and_blocks_that_do_not_fit_are_violations() -> None:
    fine = Report("a/b", "gfx942", True, 128, 0, 0, 64 << 10, 0, 1000)
    assert not list(violations([fine, fine._replace(hot=False, spilled=9)]))
    assert list(violations([fine._replace(spilled=2)])) == ["a/b on gfx942 spills (2)"]
    assert len(list(violations([fine._replace(lds_bytes=(64 << 10) + 1)]))) == 1
    assert not list(violations([fine._replace(lds_bytes=160 << 10, target="gfx950")]))
