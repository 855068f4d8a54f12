"""A run directory whose processes have noted things, for tests of what is read from it."""

import os
from pathlib import Path

import psutil

from common.protocol import Peer, ServiceName, make_seq_id
from common.recorder import Recorder, open_file

DEAD_PID = 4_194_303  # above any that the kernel gives by default
ALIVE_S = psutil.Process().create_time() + 0.5


def noted(run_dir: Path, service: ServiceName, instance: int = 0, incarnation: int = 0, dead: bool = False) -> Recorder:
    """The recorder of a process that lives as long as the tests, or is dead already."""
    run_dir.mkdir(exist_ok=True)
    number = incarnation or hash((service, instance)) & 0xFFFFFFF
    pid = DEAD_PID if dead else os.getpid()
    return open_file(run_dir, Peer(service, instance, number, "", pid, ALIVE_S), "f00d")


def seq(counter: int, tokenizer: int = 0) -> int:
    return make_seq_id(1, tokenizer, 0x1234, counter)
