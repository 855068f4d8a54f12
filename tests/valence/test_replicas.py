from typing import Any

import pytest

from common.config import load
from common.protocol import Load, Member, Peer, Status
from tests.valence.running import Server, serving, still_running
from valence.programs import Program
from valence.replicas import Impossible, ready_as, select
from valence.supervisor import ProcessView


def processes(server: Server) -> dict[str, dict[str, Any]]:
    return {f"{row['service']}-{row['instance']}": row for row in server.status()["processes"]}


def test_restart_replaces_each_process_and_waits_for_it(server: Server) -> None:
    before = processes(server)
    answer = server.command("restart", "all")
    assert answer.returncode == 0, answer.stderr
    order = [line.split()[0] for line in answer.stdout.splitlines() if line.strip()]
    assert order == ["api-0", "tokenizer-0", "scheduler-0", "worker-0"]
    after = processes(server)
    assert after.keys() == before.keys()
    assert all(after[name]["pid"] != before[name]["pid"] for name in before)
    assert after["worker-0"]["state"] == "ready"


def test_scale_up_and_down_one_by_one(server: Server) -> None:
    answer = server.command("scale", "tokenizer", "3")
    assert answer.returncode == 0, answer.stderr
    grown = processes(server)
    assert [grown[f"tokenizer-{i}"]["state"] for i in range(3)] == ["ready"] * 3
    kept_pid = grown["tokenizer-0"]["pid"]
    one = server.command("restart", "tokenizer", "--instance", "2")
    assert one.stdout.split()[:2] == ["tokenizer-2", "ready"]
    answer = server.command("scale", "tokenizer", "1")
    assert [line.split()[0] for line in answer.stdout.splitlines() if line.strip()] == ["tokenizer-2", "tokenizer-1"]
    shrunk = processes(server)
    assert sorted(shrunk) == ["api-0", "scheduler-0", "tokenizer-0", "worker-0"]
    assert shrunk["tokenizer-0"]["pid"] == kept_pid
    assert len(still_running(server.run_dir)) == 6


def test_schedulers_are_scaled_and_restarted_while_workers_stay(server: Server) -> None:
    before = processes(server)
    assert server.command("scale", "scheduler", "3").returncode == 0
    grown = processes(server)
    assert [grown[f"scheduler-{i}"]["state"] for i in range(3)] == ["ready"] * 3
    assert load(server.run_dir / "config.toml").services.scheduler.replicas == 3
    answer = server.command("restart", "scheduler")
    assert answer.returncode == 0, answer.stderr
    assert [line.split()[0] for line in answer.stdout.splitlines() if line.strip()] == [
        "scheduler-0",
        "scheduler-1",
        "scheduler-2",
    ]
    answer = server.command("scale", "scheduler", "1")
    assert [line.split()[0] for line in answer.stdout.splitlines() if line.strip()] == ["scheduler-2", "scheduler-1"]
    after = processes(server)
    assert after.keys() == before.keys()
    changed = {name for name in before if before[name]["pid"] != after[name]["pid"]}
    assert changed == {"scheduler-0"} and after["worker-0"]["state"] == "ready"


def test_workers_are_scaled_and_restarted_one_by_one(server: Server) -> None:
    assert server.command("scale", "worker", "3").returncode == 0
    grown = processes(server)
    assert [grown[f"worker-{i}"]["state"] for i in range(3)] == ["ready"] * 3
    answer = server.command("restart", "worker")
    named = [line.split()[0] for line in answer.stdout.splitlines() if line.strip()]
    assert named == ["worker-0", "worker-1", "worker-2"]
    renewed = processes(server)
    assert all(renewed[f"worker-{i}"]["pid"] != grown[f"worker-{i}"]["pid"] for i in range(3))
    assert all(renewed[f"worker-{i}"]["state"] == "ready" for i in range(3))
    assert server.command("scale", "worker", "1").returncode == 0
    assert sorted(processes(server)) == ["api-0", "scheduler-0", "tokenizer-0", "worker-0"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("scale", "gpu", "2"), "no service 'gpu' can be scaled; api, tokenizer, scheduler, worker can"),
        (("scale", "api", "0"), "1 to 64 replicas"),
        (("restart", "gpu"), "no service 'gpu'; there are worker, scheduler, tokenizer, api, and all"),
        (("restart", "api", "--instance", "7"), "no api with instance 7"),
    ],
)
def test_what_cannot_be_done_is_refused(server: Server, arguments: tuple[str, ...], reason: str) -> None:
    answer = server.command(*arguments)
    assert answer.returncode == 1
    assert reason in answer.stderr


def test_stop_ends_the_run() -> None:
    with serving() as server:
        server.read_until("curl")
        answer = server.command("stop")
        assert answer.returncode == 0, answer.stderr
        assert server.finish() == 0
        assert not server.run_dir.exists()
        assert "no server is running" in server.command("stop").stderr


def view(name: str) -> ProcessView:
    return ProcessView(Program.parse(name), 1, "running", 0.0, 0)


def test_select_goes_from_the_edge_inwards() -> None:
    views = [view(name) for name in ("api-0", "api-1", "scheduler-0", "tokenizer-0", "worker-0")]
    names = [program.name for program in select(views, "all", None)]
    assert names == ["api-0", "api-1", "tokenizer-0", "scheduler-0", "worker-0"]
    assert select(views, "api", 1) == [Program("api", 1)]
    with pytest.raises(Impossible):
        select(views, "api", 2)


def test_ready_means_this_very_process() -> None:
    peer = Peer("api", 0, 5, "ipc://x", pid=40)
    status = Status([Member(peer, "ready")], Load(), None)
    assert ready_as(status, Program("api", 0), 40)
    assert not ready_as(status, Program("api", 0), 41)
    assert not ready_as(status, Program("api", 1), 40)
    assert not ready_as(Status([Member(peer, "starting")], Load(), None), Program("api", 0), 40)
