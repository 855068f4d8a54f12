import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from common.config import load
from common.protocol import Load, Member, ModelFacts, Peer, Progress, Status
from tests.valence.running import Server
from valence.programs import Program
from valence.status import Row, all_ready, document, is_ready, join, united
from valence.supervisor import ProcessView, Supervisor

MODEL = ModelFacts("tiny", "Llama", 100, 64, (2,), 16, 8)


def member(service: str, pid: int, state: str = "ready") -> Member:
    return Member(Peer(service, 0, pid * 7, "ipc://x", pid, 1000.12345), state, stage=Progress("weights", 1, 2))


def view(service: str, pid: int, state: str = "running") -> ProcessView:
    return ProcessView(Program(service, 0), pid, state, 900.0, 0)


def test_rows_join_both_views() -> None:
    status = Status([member("api", 10), member("worker", 11), member("scheduler", 12)], Load(), MODEL)
    views = [view("api", 10), view("scheduler", 12), view("tokenizer", 13), view("worker", 0, "backoff")]
    assert join(views, status) == [
        Row("api", 0, 10, "ready", 1000.123),
        Row("scheduler", 0, 12, "ready", 1000.123),
        Row("tokenizer", 0, 13, "starting", 900.0),  # up, not a member yet
        Row("worker", 0, None, "backoff", 900.0),  # dead, though the scheduler has not noticed
    ]


def test_a_successor_is_not_taken_for_the_member_before_it() -> None:
    status = Status([member("api", 10)], Load(), MODEL)
    assert join([view("api", 99, "starting")], status) == [Row("api", 0, 99, "starting", 900.0)]


def test_a_member_that_runs_elsewhere_is_shown() -> None:
    assert join([], Status([member("worker", 5)], Load(), MODEL)) == [Row("worker", 0, 5, "ready", 1000.123)]


def test_a_process_that_does_nothing_while_work_waits_is_stalled() -> None:
    stuck = msgspec.structs.replace(member("api", 10), counters={"stalled_seconds": 61.0, "work_owed": 2.0})
    status = Status([stuck], Load(), MODEL)
    assert join([view("api", 10)], status) == [
        Row("api", 0, 10, "stalled", 1000.123, "nothing done for 61 s, 2 waiting")
    ]
    patient = load(None, ["links.stalled_after_s=100"]).links
    assert join([view("api", 10)], status, patient)[0].state == "ready"


def test_a_process_that_does_not_join_is_silent_after_a_minute() -> None:
    status = Status([], Load(), None)
    assert join([view("api", 10)], status, now_s=950.0)[0].state == "starting"
    assert join([view("api", 10)], status, now_s=961.0) == [
        Row("api", 0, 10, "silent", 900.0, "the scheduler does not list it")
    ]
    (row,) = join([view("scheduler", 10)], None, now_s=961.0)
    assert row.reason == "the scheduler does not answer"


def rows(*states: tuple[str, str]) -> list[Row]:
    return [Row(service, 0, 1, state, 0.0) for service, state in states]


def test_ready_needs_a_model_and_every_service() -> None:
    status = Status([], Load(), MODEL)
    three = [(name, "ready") for name in ("tokenizer", "scheduler", "worker")]
    assert is_ready(rows(*three, ("api", "ready"), ("api", "starting")), status)
    assert not is_ready(rows(*three, ("api", "ready")), Status([], Load(), None))
    assert not is_ready(rows(*three), status)
    assert not is_ready(rows(*three, ("api", "draining")), status)
    assert not is_ready(rows(*three, ("api", "ready")), None)


def test_all_ready_means_nobody_is_missing() -> None:
    names = ("api", "scheduler", "tokenizer", "worker")
    status = Status([member(name, pid) for pid, name in enumerate(names, 1)], Load(), MODEL)
    views = [view(name, pid) for pid, name in enumerate(names, 1)]
    assert all_ready(views, status)
    killed = [view("api", 0, "exited"), *views[1:]]  # the scheduler has not noticed
    assert not all_ready(killed, status)
    assert document(killed, {0: status})["ready"] is False


def test_the_document_without_a_scheduler() -> None:
    found = document([view("scheduler", 0, "backoff")], {})
    assert found == {
        "model": None,
        "ready": False,
        "processes": [
            {"service": "scheduler", "instance": 0, "pid": None, "state": "backoff", "since": 900.0, "reason": ""}
        ],
        "schedulers": [],
        "requests": {"running": 0, "waiting": 0},
        "kv": {"blocks_total": 0, "blocks_free": 0, "blocks_cached": 0},
        "drafts": {"tried": 0, "held": 0, "mean_length": 0.0},
    }


def test_status_of_a_running_server(server: Server) -> None:
    found = server.status()
    assert found["model"] == "SmolLM2-135M-Instruct"
    assert found["ready"] is True
    assert [(row["service"], row["instance"], row["state"]) for row in found["processes"]] == [
        ("api", 0, "ready"),
        ("scheduler", 0, "ready"),
        ("tokenizer", 0, "ready"),
        ("worker", 0, "ready"),
    ]
    assert found["kv"] == {"blocks_total": 64, "blocks_free": 64, "blocks_cached": 0}
    table = server.command("status").stdout
    assert "SmolLM2-135M-Instruct: ready" in table
    assert "scheduler" in table


def test_status_where_nothing_of_ours_supervises(tmp_path: Path) -> None:
    """As in a container: the scheduler is found by the settings that all services have."""
    own = ["--set", f"links.run_dir={tmp_path}", "--set", "links.heartbeat_s=0.1"]
    with subprocess.Popen([sys.executable, "-m", "services.scheduler", "--instance", "auto", *own]) as scheduler:
        command = [sys.executable, "-m", "valence", "status", "--json", *own]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        while scheduler.poll() is None and answer.returncode:
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
        scheduler.terminate()
    found = json.loads(answer.stdout)
    assert [(row["service"], row["instance"], row["state"]) for row in found["processes"]] == [
        ("scheduler", 0, "ready")
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (1, f"valence: no server is running in {tmp_path}\n")


def test_status_while_the_scheduler_does_not_answer(server: Server) -> None:
    pid = next(v.pid for v in Supervisor(server.run_dir).processes() if v.program.service == "scheduler")
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = server.command("status", "--json")
    finally:
        with contextlib.suppress(ProcessLookupError):  # on a busy machine it is replaced meanwhile
            os.kill(pid, signal.SIGCONT)
    assert answer.returncode == 0
    found = json.loads(answer.stdout)
    assert (found["model"], found["ready"]) == (None, False)
    assert len(found["processes"]) == 4


def scheduler_says(instance: int, running: int, model: ModelFacts | None = MODEL) -> Status:
    own = Member(Peer("scheduler", instance, 50 + instance, "ipc://x", 20 + instance, 1000.0), "ready")
    worker = Member(Peer("worker", instance, 60 + instance, "ipc://x", 30 + instance, 1000.0), "ready")
    load = Load(running=running, blocks_total=8, blocks_free=5, blocks_cached=1)
    return Status([own, worker, member("api", 10)], load, model, 2)


def test_several_schedulers_are_one_table() -> None:
    answers = {0: scheduler_says(0, 3), 1: scheduler_says(1, 4)}
    status = united(answers)
    assert status is not None and (status.load.running, status.load.blocks_total) == (7, 16)
    assert status.schedulers == 2 and status.model == MODEL and len(status.members) == 5
    views = [ProcessView(Program("scheduler", i), 20 + i, "running", 900.0, 0) for i in (0, 1)]
    found = document(views, answers)
    assert [(row["service"], row["instance"], row["state"]) for row in found["processes"]] == [
        ("api", 0, "ready"),
        ("scheduler", 0, "ready"),
        ("scheduler", 1, "ready"),
        ("worker", 0, "ready"),
        ("worker", 1, "ready"),
    ]
    assert found["requests"]["running"] == 7
    assert [row["running"] for row in found["schedulers"]] == [3, 4]
    assert united({}) is None


def test_the_first_scheduler_may_be_down() -> None:
    views = [
        ProcessView(Program("scheduler", 0), 0, "backoff", 900.0, 0),
        ProcessView(Program("scheduler", 1), 21, "running", 900.0, 0),
    ]
    found = document(views, {1: scheduler_says(1, 4)})
    states = {(row["service"], row["instance"]): row["state"] for row in found["processes"]}
    assert states["scheduler", 0] == "backoff" and states["scheduler", 1] == "ready"
    assert found["model"] == "tiny" and found["requests"]["running"] == 4
