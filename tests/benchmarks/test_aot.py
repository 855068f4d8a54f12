"""What an ahead-of-time case becomes for each target; and every kernel, compiled, uses what the kept table says."""

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from benchmarks import aot
from benchmarks.aot import (
    RESOURCES,
    TARGETS,
    Report,
    Task,
    make_source,
    merge,
    read_table,
    table_text,
    unchanged,
    violations,
    write,
)

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ["-m", "benchmarks.kernels", "--compile-only"]
RENEW = (
    f"Look at the difference that this makes: .venv/bin/python {' '.join(COMMAND)} {','.join(TARGETS)} "
    f"--json {RESOURCES.relative_to(ROOT)}"
)


def kernel(x_ptr, y_ptr, bias_ptr, num_rows, MODE: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


class Case(NamedTuple):
    name: str
    kernel: Any
    signature: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2


SIGNATURE = {"x_ptr": "*fp8e4nv:16", "y_ptr": "*bf16", "bias_ptr": None, "num_rows": "i32", "MODE": "i32", "PDL": False}
CASE = Case("case", JITFunction(kernel), SIGNATURE)


def test_types_constants_and_hints() -> None:
    source = make_source(CASE, "sm_90")
    assert source.signature == {
        "x_ptr": "*fp8e4nv",
        "y_ptr": "*bf16",
        "bias_ptr": "constexpr",
        "num_rows": "i32",
        "MODE": "constexpr",
        "PDL": "constexpr",
    }
    assert source.constants == {(2,): None, (4,): "i32", (5,): True}
    assert source.attrs == {(0,): [["tt.divisibility", 16]]}


def test_what_depends_on_the_target() -> None:
    for target, form in (("gfx942", "*fp8e4b8"), ("gfx950", "*fp8e4nv")):
        source = make_source(CASE, target)
        assert source.signature["x_ptr"] == form and source.constants[(5,)] is False


def test_a_signature_that_does_not_fit_the_kernel() -> None:
    changed = {key: value for key, value in SIGNATURE.items() if key != "num_rows"}
    with pytest.raises(ValueError, match="differ in num_rows"):
        make_source(CASE._replace(signature=changed), "sm_90")


def test_the_table_is_read_as_written() -> None:
    reports = [Report("a/b", "gfx942", True, 128, 0, 0, 1024, 3, 1000), Report("a/b", "sm_90", True, 64, 8, 8, 0, 0, 9)]
    text = table_text(reports)
    assert read_table(text) == (triton.__version__, reports)
    assert text.count("\n") == 4


def test_only_the_files_compiled_anew_change() -> None:
    old = [Report(name, "sm_90", True, 64, 0, 0, 0, 0, 9) for name in ("add/one", "add/two", "rope/add")]
    new = [old[0]._replace(registers=32)]
    assert merge(new, table_text(old), "add") == [new[0], old[2]]
    with pytest.raises(SystemExit, match="renew all of it"):
        merge(new, table_text(old).replace(triton.__version__, "3.0.0"), "add")


def named(reports: list[Report]) -> dict[str, Report]:
    return {f"{report.kernel} on {report.target}": report for report in reports}


def test_a_fresh_compile_gives_the_table(tmp_path: Path) -> None:
    """Of what has changed since it was kept, and of a sample: tests/benchmarks/test_aot_whole.py compiles all."""
    compare(tmp_path, ",".join(TARGETS), "--quick", "--changed")


def compare(folder: Path, targets: str, *options: str) -> None:
    """Other processes compile: this one interprets. Other versions of Triton are held to the limits only."""
    command = [sys.executable, *COMMAND, targets, *options, "--json", str(folder / "fresh.json")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (folder / "fresh.json").exists(), run.stdout + run.stderr
    version, fresh = read_table((folder / "fresh.json").read_text())
    assert not list(violations(fresh))
    assert run.returncode == 0, run.stderr
    kept_version, kept = read_table(RESOURCES.read_text())
    if version != kept_version:
        return
    now = named(fresh)
    quick = "--quick" in options
    was = named([row for row in kept if row.target in targets and (row.hot or row.target != "gfx950" or not quick)])
    assert now.keys() == was.keys(), f"not in both: {', '.join(sorted(now.keys() ^ was.keys()))}. {RENEW}"
    for name, report in now.items():
        assert report == was[name], f"{name}: {report}\ninstead of {was[name]}. {RENEW}"


class Kept(NamedTuple):
    """A table of two rows in a folder, and the tasks that give it."""

    path: Path
    rows: list[Report]
    todo: list[Task]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    made = [Case(name, JITFunction(kernel), SIGNATURE) for name in ("one", "two")]
    monkeypatch.setattr(aot, "cases", lambda module: made)
    monkeypatch.setattr(aot, "SAMPLE", 1000)
    monkeypatch.setattr(JITFunction, "cache_key", property(lambda self: "source"))
    rows = [Report(f"file/{name}", "gfx942", True, 128, 0, 0, 0, 0, 1000) for name in ("one", "two")]
    todo = [Task("file", number, "gfx942") for number in (0, 1)]
    write(tmp_path / "table.json", rows, todo)
    return Kept(tmp_path / "table.json", rows, todo)


def test_what_has_not_changed_is_not_compiled(kept: Kept) -> None:
    # The first of the rows is the sample.
    assert unchanged(kept.todo, kept.path) == (kept.rows[1:], kept.todo[:1])


@pytest.mark.parametrize("what", ["source", "options", "row", "nothing is known", "no table row"])
def test_what_has_changed_is_compiled(kept: Kept, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "source":
        monkeypatch.setattr(JITFunction, "cache_key", property(lambda self: "other source"))
    elif what == "options":
        monkeypatch.setattr(aot, "cases", lambda module, old=aot.cases: [c._replace(num_warps=8) for c in old(module)])
    elif what == "row":
        kept.path.write_text(table_text([kept.rows[0], kept.rows[1]._replace(registers=64)]))
    elif what == "no table row":
        kept.path.write_text(table_text(kept.rows[:1]))
    else:
        (kept.path.with_name(aot.SOURCES)).unlink()
    assert unchanged(kept.todo, kept.path) == ([], kept.todo)


def test_rows_that_are_not_compiled_anew_keep_their_old_fingerprint(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a row that is of an older source would pass for one of the present source."""
    before = aot.read_sources(kept.path)
    monkeypatch.setattr(JITFunction, "cache_key", property(lambda self: "other source"))
    other = [row._replace(kernel=row.kernel.replace("file", "other")) for row in kept.rows]
    write(kept.path, other, [task._replace(module="other") for task in kept.todo], only="other")
    after = aot.read_sources(kept.path)
    assert len(after) == 4 and before.items() <= after.items()


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
