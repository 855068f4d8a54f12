"""What a rank does with what it is told; its life and death are in test_ranks.py, its tokens in test_division.py."""

import subprocess
import sys
from multiprocessing import Pipe
from typing import Any

import msgspec
import pytest

from common.config import Config
from common.protocol import StepPlan
from services.worker.rank_child import follow
from services.worker.ranks import Join, Reset
from tests.services.worker.test_ranks import LIMIT_S, Noted


def encoded(*messages: Any) -> list[bytes]:
    return [msgspec.msgpack.encode(message) for message in messages]


def test_follows_until_the_link_ends() -> None:
    ours, theirs = Pipe()
    for frame in encoded(StepPlan(4), Reset(), StepPlan(1), StepPlan(2)):
        ours.send_bytes(frame)
    ours.close()
    engine = Noted()
    follow(engine, theirs)
    theirs.close()
    steps = [[f"StepPlan {number}", "settled"] for number in (4, 1, 2)]
    assert engine.seen == [*steps[0], "Reset", *steps[1], *steps[2]]


def test_a_frame_that_is_none_ends_the_rank() -> None:
    ours, theirs = Pipe()
    ours.send_bytes(b"\x93\x01")
    with pytest.raises(msgspec.DecodeError):
        follow(Noted(), theirs)
    for end in (ours, theirs):
        end.close()


def test_settings_reach_it_as_they_are() -> None:
    config = Config()
    join = msgspec.msgpack.decode(msgspec.msgpack.encode(Join(1, 0, "/run/x", config)), type=Join)
    assert join.config == config


def test_a_rank_whose_parent_has_gone_ends_at_once() -> None:
    """It was started, and before it could ask the kernel to end with its parent, that had died."""
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "services.worker.rank_child", str(theirs.fileno()), "1"]
    child = subprocess.run(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, timeout=LIMIT_S, check=False)
    for end in (ours, theirs):
        end.close()
    assert child.returncode == 1 and b"rank 0 is gone" in child.stderr
