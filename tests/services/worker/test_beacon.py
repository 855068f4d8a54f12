from pathlib import Path

from common.config import load
from common.lifecycle import Process, scheduler_endpoint
from common.protocol import Heartbeat, Hello, Progress, ToScheduler
from common.transport import Inbox, LinkCounters
from services.worker.beacon import Beacon, Place


def test_it_beats_while_the_main_thread_is_busy(tmp_path: Path) -> None:
    config = load(None, [f"links.run_dir={tmp_path}", "links.heartbeat_s=0.02"])
    process = Process("worker", 0, config)
    inbox: Inbox = Inbox(scheduler_endpoint(config), ToScheduler, 100, LinkCounters())
    beacon = Beacon(
        process, Place(scheduler_endpoint(config), Hello(process.peer("ipc://x"), "hash")), lambda: {"steps": 4.0}
    )
    beacon.start()

    def next_message(kind: type) -> object:
        while True:
            assert inbox.wait(20)
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
    beacon.end()
    assert not beacon.is_alive()
    inbox.close()
