from typing import Any

from common.columns import unpack_i32, unpack_u64
from common.protocol import Abort, FinishReason, Refused, Stop, TextBatch, TextFinished
from services.tokenizer.outbox import Outbox, Upstream


class Link:
    """A link that can be full."""

    def __init__(self) -> None:
        self.room = 100
        self.sent: list[Any] = []

    def send(self, message: Any) -> bool:
        if len(self.sent) >= self.room:
            return False
        self.sent.append(message)
        return True

    def send_to(self, incarnation: int, message: Any) -> bool:
        assert incarnation == 7
        return self.send(message)


def add(box: Outbox, seq_id: int, text: str) -> None:
    box.seq_ids.append(seq_id)
    box.first_index.append(3)
    box.counts.append(2)
    box.texts.append(text)


def test_rows_become_one_message() -> None:
    box, link = Outbox(7, 0.0), Link()
    add(box, 2**63, "a")
    add(box, 5, "b")
    box.finished.append(TextFinished(5, FinishReason.EOS, 1, 2))
    assert box.flush(link.send_to) and box.turn == 1
    [batch] = link.sent
    assert list(unpack_u64(batch.seq_ids)) == [2**63, 5] and batch.texts == ["a", "b"]
    assert list(unpack_i32(batch.first_index)) == [3, 3] and list(unpack_i32(batch.counts)) == [2, 2]
    assert batch.finished == [TextFinished(5, FinishReason.EOS, 1, 2)]
    assert box.flush(link.send_to) and len(link.sent) == 1, "nothing new, nothing sent"


def test_full_link_keeps_rows_in_their_turn() -> None:
    box, link = Outbox(7, 0.0), Link()
    link.room = 0
    add(box, 5, "a")
    assert not box.flush(link.send_to) and box.turn == 0
    add(box, 6, "b")
    link.room = 1
    assert box.flush(link.send_to)
    assert link.sent[0].texts == ["a", "b"]


def test_replies_go_first_and_each_once() -> None:
    box, link = Outbox(7, 0.0), Link()
    box.replies.extend([Refused(1, "invalid", ""), Refused(2, "invalid", "")])
    add(box, 5, "a")
    link.room = 1
    assert not box.flush(link.send_to)
    link.room = 9
    assert box.flush(link.send_to)
    assert [getattr(message, "seq_id", "batch") for message in link.sent] == [1, 2, "batch"]
    assert isinstance(link.sent[2], TextBatch)


def test_upstream_keeps_the_order_when_the_link_was_full() -> None:
    link = Link()
    upstream = Upstream(link.send)
    link.room = 1
    upstream.put(Stop(1))
    upstream.put(Stop(2))
    upstream.put(Abort(3))
    assert not upstream.offer(Stop(4)), "nothing may overtake what waits"
    assert not upstream.flush()
    link.room = 9
    assert upstream.flush() and upstream.offer(Stop(5))
    assert link.sent == [Stop(1), Stop(2), Abort(3), Stop(5)]


def test_upstream_forgets_what_a_lost_scheduler_should_have_heard() -> None:
    link = Link()
    link.room = 0
    upstream = Upstream(link.send)
    upstream.put(Stop(1))
    upstream.clear()
    link.room = 9
    assert upstream.flush() and link.sent == []


def test_acceptances_are_reason_enough_for_a_batch() -> None:
    box, link = Outbox(7, 0.0), Link()
    box.accepted.append(2**63)
    link.room = 0
    assert not box.flush(link.send_to)
    link.room = 1
    assert box.flush(link.send_to) and list(unpack_u64(link.sent[0].accepted)) == [2**63]
    assert box.flush(link.send_to) and len(link.sent) == 1
