"""Grammars of clients in children: what takes for ever, or dies, costs its own request; what is known costs nothing."""

import os
import signal
from collections.abc import Iterator

import pytest

from common.errors import Reject, RejectReason
from common.protocol import Grammar
from services.tokenizer import checker as module
from services.tokenizer import children
from services.tokenizer.checker import Checker
from services.tokenizer.children import Child

ENDLESS = Grammar("regex", ".*" * 20_000, "guided_regex")  # hours


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    made = Checker(cpu_s=0.5)
    yield made
    made.close()


def refused(checker: Checker, grammar: Grammar) -> Reject:
    with pytest.raises(Reject) as caught:
        checker.check(grammar)
    return caught.value


def test_what_is_known_is_not_asked_again(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Grammar("regex", "a", "x"), Grammar("regex", "(", "x")
    checker.check(good)
    first = refused(checker, bad)
    assert first.param == "x" and "unclosed group" in first.message
    monkeypatch.setattr(Child, "ask", None)
    checker.check(good)
    assert refused(checker, bad).message == first.message


def test_what_takes_for_ever_is_ended_and_remembered(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    reject = refused(checker, ENDLESS)
    assert (reject.reason, reject.param) == (RejectReason.INVALID, "guided_regex")
    assert "more than 0.5 s of processor time" in reject.message
    checker.check(Grammar("regex", "b", "x"))
    monkeypatch.setattr(Child, "ask", None)
    assert refused(checker, ENDLESS).message == reject.message


def test_a_child_that_was_killed_is_replaced(checker: Checker) -> None:
    checker.check(Grammar("regex", "c", "x"))
    for pid in checker._children.pids():
        os.kill(pid, signal.SIGKILL)
    checker.check(Grammar("regex", "d", "x"))


def test_few_are_known(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 3)
    monkeypatch.setattr(module, "KEPT_BYTES", 20)
    for text in ("aaaa", "bbbb", "cccc", "dddd"):
        checker.check(Grammar("regex", text, "x"))
    assert [grammar.text for grammar in checker._known] == ["bbbb", "cccc", "dddd"]
    checker.check(Grammar("regex", "e" * 18, "x"))
    assert [grammar.text for grammar in checker._known] == ["e" * 18] and checker._known_bytes == 18


def test_a_system_without_processes_is_no_fault_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> Child:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(children, "Child", fail)
    assert refused(Checker(1.0), Grammar("regex", "a", "x")).reason is RejectReason.UNAVAILABLE


def test_a_closed_checker_refuses() -> None:
    checker = Checker(1.0)
    checker.close()
    assert refused(checker, Grammar("regex", "a", "x")).reason is RejectReason.UNAVAILABLE
