import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common import lease
from common.errors import ConfigError
from common.lease import here, take

HOLD = """
import sys
from pathlib import Path
from common.lease import take

print(take(Path(sys.argv[1]), "worker").number, flush=True)
sys.stdin.read()
"""


def hold(run_dir: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_each_process_gets_the_lowest_number_that_is_free(tmp_path: Path) -> None:
    found = [take(tmp_path, "worker") for _ in range(3)]
    assert [each.number for each in found] == [0, 1, 2]
    assert take(tmp_path, "tokenizer").number == 0
    os.close(found[1].fd)
    assert take(tmp_path, "worker").number == 1
    assert take(tmp_path, "worker").number == 3


def test_a_killed_process_gives_its_number_back(tmp_path: Path) -> None:
    first, second = hold(tmp_path), hold(tmp_path)
    numbers = [int(process.stdout.readline()) for process in (first, second)]
    assert sorted(numbers) == [0, 1]
    first.kill()
    first.communicate()
    assert take(tmp_path, "worker").number == numbers[0]
    second.kill()
    second.communicate()


def test_a_child_of_the_holder_does_not_hold_on(tmp_path: Path) -> None:
    """Compilers and renderers may outlive their parent for a moment."""
    held = take(tmp_path, "worker")
    command = [sys.executable, "-c", "print(); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout.readline() == b"\n"  # exec is over, which closes what a child shall not have
        os.close(held.fd)
        assert take(tmp_path, "worker").number == 0
        child.communicate(b"\n")


def test_what_a_killed_predecessor_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("worker-0.1234abcd", "worker-1.1234abcd", "scheduler"):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / name))
    (tmp_path / "worker-0.log").touch()
    take(tmp_path, "worker")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "scheduler",
        "worker-0.lease",
        "worker-0.log",
        "worker-1.1234abcd",
    ]


def test_only_living_processes_of_this_namespace_are_here(tmp_path: Path) -> None:
    held = take(tmp_path, "api")
    left = take(tmp_path, "tokenizer")
    os.close(left.fd)
    elsewhere = take(tmp_path, "worker")
    os.pwrite(elsewhere.fd, b"%d %d" % (lease.namespace() + 1, os.getpid()), 0)
    assert list(here(tmp_path)) == [("api", 0, os.getpid())]
    os.close(held.fd)
    assert list(here(tmp_path)) == []


def test_there_is_an_end_to_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "MOST", 2)
    for _ in range(2):
        take(tmp_path, "api")
    with pytest.raises(ConfigError, match="2 processes of api run already"):
        take(tmp_path, "api")


def test_a_folder_that_cannot_hold_locks(tmp_path: Path) -> None:
    (tmp_path / "api-0.lease").mkdir()
    with pytest.raises(ConfigError, match=r"cannot number this process by .*api-0\.lease: Is a directory"):
        take(tmp_path, "api")
