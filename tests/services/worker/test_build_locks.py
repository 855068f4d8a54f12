"""Stale locks and turns, with real processes that live, are killed, and hold what they hold."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.worker import build_locks
from services.worker.build_locks import QUIET_S, Presence, Turn, clean, last_change, marks, present_since, turn

# The three kinds that AITER's issue 5266 names, one of template ops, and one of a process that broke another's.
KINDS = (
    "jit/build/lock_module_rmsnorm",
    "jit/build/module_rmsnorm/build/lock",
    "jit/build/module_rmsnorm/build/.ninja_lock",
    "root/build/pa_9f/lock",
    "root/build/gfx942/kernel_1.lock",
    "jit/build/module_rmsnorm/build/lock.steal",
)


def make(folder: Path, names: tuple[str, ...] = KINDS) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@contextmanager
def process(code: str) -> Iterator["subprocess.Popen[str]"]:
    """Python in this tree, ready as soon as it has printed a line; killed at the end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-P", "-c", code]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def user(folder: Path) -> str:
    """Uses the folder until somebody kills it."""
    return (
        "import sys, pathlib; from services.worker.build_locks import Presence\n"
        f"kept = Presence(pathlib.Path({str(folder)!r})); print('ready', flush=True); sys.stdin.read()"
    )


def end(child: "subprocess.Popen[str]") -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()


def test_all_kinds_are_stale_when_the_builder_is_killed(tmp_path: Path) -> None:
    with process(user(tmp_path)) as builder:
        make(tmp_path)
        others = present_since(tmp_path)
        assert len(others) == 1
        removed, held = clean(tmp_path)
        assert removed == [] and held == sorted(tmp_path / name for name in KINDS), "the builder lives"
        end(builder)
        assert present_since(tmp_path) == []
        removed, held = clean(tmp_path)
        assert removed == sorted(tmp_path / name for name in KINDS) and held == []
    assert marks(tmp_path) == [] and list((tmp_path / "users").iterdir()) == []


def test_locks_older_than_every_live_process_are_stale(tmp_path: Path) -> None:
    """Left by an earlier container, while other workers already serve."""
    make(tmp_path)
    for path in marks(tmp_path):
        os.utime(path, (1e9, 1e9))
    with process(user(tmp_path)):
        make(tmp_path, ("jit/build/lock_module_quant",))  # of the process that lives
        removed, held = clean(tmp_path)
    assert len(removed) == len(KINDS) and held == [tmp_path / "jit/build/lock_module_quant"]


def test_one_that_may_be_held_is_waited_for_until_nothing_has_changed_for_long(tmp_path: Path) -> None:
    now_s = time.time()
    with process(user(tmp_path)):
        make(tmp_path, ("jit/build/lock_module_quant", "jit/build/module_quant/build/lock"))
        made = tmp_path / "jit/build/module_quant/build/quant.o"
        made.touch()
        assert len(clean(tmp_path, now_s=now_s + QUIET_S - 60)[1]) == 2
        os.utime(made, (now_s + 500, now_s + 500))
        assert last_change(tmp_path / "jit/build/lock_module_quant") == pytest.approx(now_s + 500)
        assert len(clean(tmp_path, now_s=now_s + QUIET_S + 400)[1]) == 2, "its objects grow"
        removed, held = clean(tmp_path, now_s=now_s + QUIET_S + 600)
        assert len(removed) == 2 and held == []


def test_an_own_presence_is_no_other(tmp_path: Path) -> None:
    own = Presence(tmp_path)
    assert present_since(tmp_path, own) == [] and len(present_since(tmp_path)) == 1
    make(tmp_path)
    assert len(clean(tmp_path, own)[0]) == len(KINDS)
    own.end()
    own.end()
    assert present_since(tmp_path) == []


def test_what_is_no_lock_stays(tmp_path: Path) -> None:
    kept = (
        "jit/module_quant.so",
        "jit/build/module_quant/build/build.ninja",
        "root/build/pa_9f/lib.so",
        "jit/lockfile",
    )
    make(tmp_path, kept)
    clean(tmp_path)
    assert all((tmp_path / name).exists() for name in kept)


BUILDER = """
import pathlib, sys, time
from services.worker.build_locks import turn
root = pathlib.Path({root!r})
def waiting(waited_s, holder): (root / f"waits-{name}").write_text(holder)
with turn(root, lambda: (root / "sealed").exists(), waiting) as alone:
    with open(root / "order", "a") as file: file.write("{name} " + ("alone" if alone else "beside") + "\\n")
    print("ready", flush=True)
    if {waits}: sys.stdin.readline()
    {then}
"""


def builder(root: Path, name: str, waits: bool, then: str = "") -> str:
    return BUILDER.format(root=str(root), name=name, waits=waits, then=then or "pass")


def appears(path: Path) -> str:
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    return path.read_text()


@contextmanager
def started(code: str) -> Iterator["subprocess.Popen[str]"]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_one_builds_the_others_wait_and_then_find_all_of_it(tmp_path: Path) -> None:
    seal = "(root / 'sealed').touch()"
    with (
        process(builder(tmp_path, "first", True, seal)) as first,
        started(builder(tmp_path, "second", False)) as second,
    ):
        assert appears(tmp_path / "waits-second").strip() == str(first.pid)
        assert (tmp_path / "order").read_text() == "first alone\n"
        assert first.stdin is not None
        first.stdin.write("\n")
        first.stdin.flush()
        assert second.wait() == 0
    assert (tmp_path / "order").read_text() == "first alone\nsecond beside\n"


def test_a_builder_that_is_killed_leaves_its_turn(tmp_path: Path) -> None:
    with process(builder(tmp_path, "first", True)) as first, started(builder(tmp_path, "second", False)) as second:
        appears(tmp_path / "waits-second")
        end(first)
        assert second.wait() == 0
    assert (tmp_path / "order").read_text() == "first alone\nsecond alone\n"


def test_those_who_find_it_ready_start_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "sealed").touch()
    with process(builder(tmp_path, "first", True)), process(builder(tmp_path, "second", True)):
        assert sorted((tmp_path / "order").read_text().split()) == ["beside", "beside", "first", "second"]
        assert not Turn(tmp_path).take(exclusive=True), "nobody builds anew beneath them"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(build_locks.fcntl, "flock", refuse)
    never: Callable[[float, str], None] = lambda waited_s, holder: pytest.fail("waits for ever")  # noqa: E731
    with turn(tmp_path, lambda: False, never) as alone:
        assert alone
    other = Presence(tmp_path)
    make(tmp_path)
    assert clean(tmp_path)[0] == [], "nobody knows whether it lives"
    other.end()
