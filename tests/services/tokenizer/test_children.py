"""What `Renderer` and `Checker` do not show of their children."""

import os
import signal

import pytest

from common.errors import Reject, RejectReason
from common.protocol import Grammar
from services.tokenizer.children import Child, Children, Died
from services.tokenizer.grammar_child import Check

MODULE = "services.tokenizer.grammar_child"
CHECK = Check(Grammar("regex", "a", "x"), 1.0)


def test_calls_one_after_the_other_have_the_same_child() -> None:
    children = Children(MODULE, "a test")
    children.start()
    first = children.pids()
    for _ in range(2):
        children.ask(CHECK, 60.0)
    assert children.pids() == first
    children.close()
    assert children.pids() == []


def test_one_that_dies_twice_is_told() -> None:
    def prepare(child: Child) -> None:
        os.kill(child.pid, signal.SIGKILL)

    children = Children(MODULE, "a test", prepare)
    with pytest.raises(Died):
        children.ask(CHECK, 60.0)
    assert children.pids() == []


def test_a_refused_preparation_leaves_no_child() -> None:
    def prepare(child: Child) -> None:
        raise Reject(RejectReason.INVALID, "no", "x")

    children = Children(MODULE, "a test", prepare)
    with pytest.raises(Reject, match="no"):
        children.start()
    assert children.pids() == []
