import subprocess
import sys
from pathlib import Path

import pytest

from common.config import load
from common.protocol import Load, Member, Peer, Status
from tests.valence.running import Server
from valence.errors import CommandError
from valence.live import named, trouble

LINKS = load(None, ["links.stalled_after_s=60"]).links


def status(service: str, state: str = "ready", stalled_s: float = 0.0) -> Status:
    counters = {"stalled_seconds": stalled_s, "work_owed": 2.0}
    return Status([Member(Peer(service, 1, 5, "ipc://x"), state, counters=counters)], Load(), None)


def test_a_listed_process_lives() -> None:
    for service in ("api", "tokenizer", "worker", "scheduler"):
        assert trouble(named(f"{service}-1"), status(service), LINKS) == ""
    assert trouble(named("api-0"), status("api"), LINKS) == "the scheduler does not list it"
    assert trouble(named("worker-1"), status("api"), LINKS) == "the scheduler does not list it"


def test_without_a_scheduler_only_the_scheduler_is_to_blame() -> None:
    assert trouble(named("scheduler-0"), None, LINKS) == "it does not answer"
    assert trouble(named("worker-0"), None, LINKS) == ""


def test_standing_still_counts_where_a_restart_helps() -> None:
    assert trouble(named("tokenizer-1"), status("tokenizer", stalled_s=61), LINKS) == "nothing done for 61 s, 2 waiting"
    assert trouble(named("tokenizer-1"), status("tokenizer", "starting", 61), LINKS) == ""
    assert trouble(named("worker-1"), status("worker", stalled_s=61), LINKS) == ""


@pytest.mark.parametrize("name", ["", "worker", "worker-", "worker-x", "disk-0", "-1"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(CommandError, match="names are like worker-0"):
        named(name)


def test_the_probe_of_a_running_server(server: Server) -> None:
    for name in ("worker-0", "scheduler-0", "tokenizer-0", "api-0"):
        answer = server.command("status", "--live", name)
        assert (answer.returncode, answer.stdout) == (0, f"{name} lives\n")
    answer = server.command("status", "--live", "tokenizer-7")
    assert (answer.returncode, answer.stderr) == (1, "valence: tokenizer-7: the scheduler does not list it\n")


def test_the_probe_without_a_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "valence", "status", "--run-dir", str(tmp_path), "--live", "scheduler-0"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (1, "valence: scheduler-0: it does not answer\n")
