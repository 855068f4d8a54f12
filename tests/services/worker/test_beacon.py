import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import load
from common.lifecycle import Process
from common.protocol import Heartbeat, Hello, Progress, ToScheduler, ToWorker
from common.transport import Inbox, LinkCounters, scheduler_endpoint
from services.worker.beacon import Beacon, Place
from services.worker.mailbox import Mailbox


def test_it_beats_while_the_main_thread_is_busy(tmp_path: Path) -> None:
    config = load(None, [f"links.run_dir={tmp_path}", "links.heartbeat_s=0.02"])
    process = Process("worker", 0, config)
    inbox: Inbox = Inbox(scheduler_endpoint(config), ToScheduler, 100, LinkCounters())
    own: Inbox = Inbox(process.inbox_endpoint(), ToWorker, 100, LinkCounters())
    place = Place(scheduler_endpoint(config), Hello(process.peer("ipc://x"), "hash"))
    beacon = Beacon(process, place, lambda: {"steps": 4.0}, Mailbox(own))
    beacon.start()

    def next_message(kind: type) -> object:
        while True:
            assert inbox.wait(240)
            for sender, message in inbox.drain():
                assert sender == process.incarnation
                if isinstance(message, kind):
                    return message

    assert next_message(Hello).peer.service == "worker"
    assert next_message(Heartbeat).state == "starting"
    beacon.stage, beacon.progress, beacon.state, beacon.joined = Progress("weights", 3, 9), 5, "ready", True
    while (beat := next_message(Heartbeat)).state != "ready":
        pass
    assert (beat.stage, beat.progress, beat.counters["steps"]) == (Progress("weights", 3, 9), 5, 4)
    beacon.received, beacon.finished = 7, 5
    while (beat := next_message(Heartbeat)).counters["stalled_seconds"] < 0.05:
        pass
    assert beat.counters["work_owed"] == 2
    beacon.finished = 7
    while (beat := next_message(Heartbeat)).counters["work_owed"]:
        pass
    assert beat.counters["stalled_seconds"] == 0
    beacon.end()
    assert not beacon.is_alive()
    own.close()
    inbox.close()


HUNG = """
import signal, sys, time
from common.config import load
from common.lifecycle import Process
from common.transport import scheduler_endpoint
from common.protocol import Hello, Load, Members, ToWorker
from common.transport import Inbox, LinkCounters, Push
from services.worker.beacon import Beacon, Place
from services.worker.mailbox import Mailbox

config = load(None, [f"links.run_dir={sys.argv[1]}", "links.heartbeat_s=0.05", "links.drain_s=0.1"])
process = Process("worker", 0, config)
inbox = Inbox(process.inbox_endpoint(), ToWorker, 100, LinkCounters())
place = Place(scheduler_endpoint(config), Hello(process.peer(inbox.endpoint), "hash"))
beacon = Beacon(process, place, dict, Mailbox(inbox))
signal.signal(signal.SIGTERM, lambda *_: None)
signal.set_wakeup_fd(beacon.signals)
beacon.start()
push = Push(inbox.endpoint, 1, 100, LinkCounters())
if sys.argv[2] == "departed":
    push.send(Members([], [process.incarnation], Load()))
print("hangs", flush=True)
while True:
    time.sleep(1000)  # as a call into a driver that does not return
"""


def hung(run_dir: Path, how: str) -> subprocess.Popen:
    command = [sys.executable, "-c", HUNG, str(run_dir), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "hangs\n"
    return process


def test_a_hung_worker_that_was_given_up_ends(tmp_path: Path) -> None:
    process = hung(tmp_path, "departed")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "the scheduler has given this worker up, 0 steps are not done" in errors


@pytest.mark.parametrize("signals", [1, 2])
def test_a_hung_worker_does_not_outlive_a_stop(tmp_path: Path, signals: int) -> None:
    """One signal: after the drain time. Two: at once."""
    process = hung(tmp_path, "")
    for _ in range(signals):
        os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 1
