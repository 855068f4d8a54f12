"""One batch per tokenizer, in order."""

from common.columns import pack_i32, pack_u64, unpack_i32, unpack_u64
from common.protocol import Finished, FinishReason, make_seq_id
from services.scheduler.outbox import Outbox


def test_rows_and_ends_go_to_their_tokenizer_in_order() -> None:
    outbox = Outbox()
    first, second = make_seq_id(0, 3, 1, 1), make_seq_id(0, 4, 1, 2)
    outbox.add_rows(3, pack_u64((first, first)), pack_i32((0, 1)), pack_i32((10, 11)))
    outbox.add_row(first, 2, 12)
    outbox.add_row(second, 0, 20)
    outbox.finish(Finished(first, FinishReason.EOS, 12))
    sends = outbox.drain()
    assert [send.tokenizer for send in sends] == [3, 4]
    batch = sends[0].batch
    assert list(unpack_u64(batch.seq_ids)) == [first] * 3
    assert list(unpack_i32(batch.first_index)) == [0, 1, 2]
    assert list(unpack_i32(batch.tokens)) == [10, 11, 12]
    assert batch.finished == [Finished(first, FinishReason.EOS, 12)]
    assert list(unpack_i32(sends[1].batch.tokens)) == [20] and sends[1].batch.finished == []


def test_draining_empties() -> None:
    outbox = Outbox()
    assert outbox.drain() == []
    outbox.finish(Finished(make_seq_id(0, 7, 0, 0), FinishReason.ABORT))
    assert len(outbox.drain()) == 1
    assert outbox.drain() == []


def test_acceptances_ride_along_or_are_told_on_demand() -> None:
    outbox = Outbox()
    outbox.accept(2 << 48)
    outbox.accept(3 << 48)
    assert outbox.drain() == []
    outbox.add_row(2 << 48, 0, 7)
    [sent] = outbox.drain()
    assert sent.tokenizer == 2 and sent.batch.accepted == pack_u64((2 << 48,))
    outbox.tell_accepted()
    [sent] = outbox.drain()
    assert sent.tokenizer == 3 and sent.batch.accepted == pack_u64((3 << 48,)) and sent.batch.seq_ids == b""
    outbox.tell_accepted()
    assert outbox.drain() == []


def test_cached_tokens_go_with_the_first_token_whatever_follows_in_the_step() -> None:
    outbox = Outbox()
    first = make_seq_id(0, 4, 1, 0)
    outbox.add_cached(first, 16)
    outbox.add_row(first, 0, 300)
    outbox.add_row(first + 1, 5, 301)
    (send,) = outbox.drain()
    assert (send.tokenizer, send.batch.cached) == (4, {first: 16}) and len(send.batch.seq_ids) == 16
    assert not outbox.drain()
