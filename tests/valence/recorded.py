"""A run directory whose processes have noted things, for tests of what is read from it."""

import fcntl
import os
import time
from pathlib import Path
from unittest import mock

from common.protocol import Peer, ServiceName, make_seq_id
from common.recorder import Recorder, open_file

DEAD_PID = 4_194_303  # above any that the kernel gives by default
SINCE_S = time.time()


def noted(run_dir: Path, service: ServiceName, instance: int = 0, incarnation: int = 0, dead: bool = False) -> Recorder:
    """The recorder of a process that lives as long as the tests, or is dead already."""
    run_dir.mkdir(exist_ok=True)
    number = incarnation or hash((service, instance)) & 0xFFFFFFF
    pid = DEAD_PID if dead else os.getpid()
    peer = Peer(service, instance, number, "", pid, SINCE_S)
    if dead:
        with mock.patch.object(fcntl, "flock"):  # its lock went with it
            return open_file(run_dir, peer, "f00d")
    return open_file(run_dir, peer, "f00d")


def seq(counter: int, tokenizer: int = 0) -> int:
    return make_seq_id(1, tokenizer, 0x1234, counter)
