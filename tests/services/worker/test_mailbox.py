import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.protocol import Load, Members, StepPlan, ToWorker
from common.transport import Inbox, LinkCounters, Push
from services.worker.mailbox import Mailbox


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    inbox: Inbox = Inbox(f"ipc://{tmp_path}/worker", ToWorker, 100, LinkCounters())
    yield inbox
    inbox.close()


@pytest.fixture
def push(inbox: Inbox) -> Iterator[Push]:
    push = Push(inbox.endpoint, 7, 100, LinkCounters())
    yield push
    push.close()


def members(*departed: int) -> Members:
    return Members([], list(departed), Load())


def peeked(mailbox: Mailbox, inbox: Inbox, count: int) -> list[Members]:
    """What peeks tell, until so many frames have come."""
    told: list[Members] = []
    while inbox.counters.received < count:
        told += mailbox.peek()
    return told


def test_what_was_peeked_at_is_still_there_in_order(inbox: Inbox, push: Push) -> None:
    mailbox = Mailbox(inbox)
    for message in (StepPlan(1), members(5), StepPlan(2)):
        push.send(message)
    assert peeked(mailbox, inbox, 3) == [members(5)]
    push.send(StepPlan(3))
    assert mailbox.wait(20)
    batch: list = []
    while len(batch) < 4:
        batch += mailbox.drain()
    assert batch == [(7, StepPlan(1)), (7, members(5)), (7, StepPlan(2)), (7, StepPlan(3))]
    assert not mailbox.wait(0) and mailbox.drain() == []


def test_of_many_lists_the_newest_is_kept(inbox: Inbox, push: Push) -> None:
    mailbox = Mailbox(inbox)
    for number in range(50):
        push.send(members(number))
        peeked(mailbox, inbox, number + 1)
    assert mailbox.drain() == [(7, members(49))]


def test_a_main_thread_that_waits_is_not_disturbed(inbox: Inbox, push: Push) -> None:
    mailbox = Mailbox(inbox)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(mailbox.wait(60)))
    waiting.start()
    while not mailbox._lock.locked():
        pass
    assert mailbox.peek() == []
    push.send(StepPlan(1))
    waiting.join()
    assert found == [True]
    assert mailbox.drain() == [(7, StepPlan(1))]


def test_it_knows_when_the_main_thread_last_looked(inbox: Inbox) -> None:
    mailbox = Mailbox(inbox)
    before_s = mailbox.looked_s
    mailbox.peek()
    assert mailbox.looked_s == before_s
    mailbox.wait(0)
    assert mailbox.looked_s > before_s
