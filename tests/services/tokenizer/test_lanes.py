"""Streams between two schedulers that the test plays: who has what, moves, and what a dead tokenizer has left."""

from array import array
from typing import Any

import pytest

from common.columns import pack_i32, pack_u64
from common.dialects.registry import Dialects
from common.protocol import (
    Abort,
    Admit,
    Finished,
    FinishReason,
    Load,
    ModelFacts,
    PromptKind,
    Refused,
    Sampling,
    Stop,
    Submit,
    TextBatch,
    TextFinished,
    TokenBatch,
    make_seq_id,
)
from common.vocabulary import Vocabulary
from services.tokenizer.encode import Prompt
from services.tokenizer.formats import Formats
from services.tokenizer.lanes import Lanes
from services.tokenizer.outbox import Outbox
from services.tokenizer.streams import Streams, box_key

WORDS = Vocabulary([bytes([byte]) for byte in range(256)] + [b"</s>"], special=[256], lead_spaces=1)
MODEL = ModelFacts("m", "llama", 257, 100, (256,), 16, 10)
X = make_seq_id(0, 0, 1, 0)
OLD = make_seq_id(0, 7, 1, 40)  # X's first id, at a tokenizer that has died


class Pair:
    """Two schedulers; `takers` and `speakers` say how they are."""

    def __init__(self) -> None:
        self.sent: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        self.takers, self.speakers = [0, 1], [0, 1]
        self.full = False
        self.lanes = Lanes(self.tell, lambda: self.takers, lambda: self.speakers)
        self.streams = Streams(self.lanes)
        self.streams.speak(Formats(Dialects(None, None), WORDS))
        self.box = self.streams.boxes[box_key(X)] = Outbox(1, 0.0)
        for instance in (0, 1):
            self.lanes.heard(instance, 0.0, 5.0)

    def tell(self, scheduler: int, message: Any) -> bool:
        if not self.full:
            self.sent[scheduler].append(message)
        return not self.full

    def admit(self, seq_id: int = X, **fields: Any) -> None:
        request = self.streams.open(Submit(seq_id, PromptKind.TEXT, Sampling(50, seed=3), **fields), self.box)
        assert request is not None
        self.streams.admit(request, Prompt(array("i", list(b"hi"))), MODEL)

    def only(self, taker: int) -> None:
        self.takers = [taker]

    def tokens(self, scheduler: int, text: str, first: int = 0, finished: list[Finished] | None = None) -> None:
        count = len(text)
        index, tokens = range(first, first + count), list(text.encode())
        batch = TokenBatch(pack_u64([X] * count), pack_i32(index), pack_i32(tokens), finished or [])
        self.streams.take(batch, scheduler)

    def flush(self) -> tuple[str, list[TextFinished]]:
        """Text and terminals since the last call."""
        sent: list[TextBatch] = []
        assert self.streams.flush(lambda incarnation, message: sent.append(message) is None)
        return "".join("".join(batch.texts) for batch in sent), [end for batch in sent for end in batch.finished]

    def taken(self, scheduler: int) -> list[Any]:
        messages, self.sent[scheduler] = self.sent[scheduler], []
        return messages


@pytest.fixture
def pair() -> Pair:
    return Pair()


def again(output: str, **fields: Any) -> Admit:
    return Admit(
        X, pack_i32(list(b"hi")), Sampling(50, seed=3), output=pack_i32(list(output.encode())), again=True, **fields
    )


def test_what_ends_a_sequence_goes_where_it_is(pair: Pair) -> None:
    pair.only(1)
    pair.admit(stop=("b",))
    pair.tokens(1, "ab")
    assert [type(message) for message in pair.taken(1)] == [Admit, Stop] and not pair.taken(0)
    pair.admit(X + 1)
    pair.streams.abort(X + 1)
    assert pair.taken(1)[1:] == [Abort(X + 1)] and not pair.taken(0)


def test_the_api_is_told_which_scheduler_has_a_sequence_unless_it_is_the_first(pair: Pair) -> None:
    pair.only(0)
    pair.admit()
    assert not pair.box.engines
    pair.takers = [0, 1]
    pair.lanes.leave(0)
    pair.tokens(1, "a")  # it is told with what comes of it
    sent: list[TextBatch] = []
    assert pair.streams.flush(lambda incarnation, message: sent.append(message) is None)
    assert [batch.engines for batch in sent] == [{X: 1}] and not pair.box.engines
    pair.lanes.lane(0).leaving.clear()
    pair.lanes.lane(0).moved.clear()
    pair.lanes.leave(1)
    assert pair.box.engines == {X: 0}


def test_tokens_of_another_scheduler_are_dropped_and_ended_there(pair: Pair) -> None:
    pair.only(0)
    pair.admit()
    pair.tokens(1, "zz", finished=[Finished(X, FinishReason.LENGTH)])
    pair.tokens(0, "a")
    assert pair.flush() == ("a", []) and pair.streams.counts.unknown_results == 2
    pair.streams.refused(Refused(X, "overloaded", "late word of the other"), 1)
    assert pair.flush() == ("", []) and not pair.taken(1)
    pair.lanes.heard(1, 1.0, 5.0)
    assert pair.taken(1) == [Abort(X)]


def test_a_scheduler_that_goes_leaves_its_sequences_to_another(pair: Pair) -> None:
    pair.only(0)
    pair.admit()
    pair.tokens(0, "ab")
    pair.taken(0)
    pair.lanes.leave(0)
    assert not pair.taken(0) and not pair.taken(1), "nobody can take it"
    pair.only(1)
    pair.lanes.leave(0)
    pair.lanes.leave(0)
    assert pair.taken(1) == [again("ab")] and not pair.taken(0), "it is silent"
    pair.tokens(0, "cd", 2)
    pair.tokens(1, "c", 2)
    assert pair.flush() == ("abc", [])
    pair.lanes.heard(0, 9.0, 5.0)
    pair.lanes.heard(0, 9.1, 5.0)
    assert pair.taken(0) == [Abort(X)], "it is told once when it speaks again"
    pair.tokens(0, "", finished=[Finished(X, FinishReason.ABORT)])
    assert pair.flush() == ("", []), "that is not the sequence's end"
    pair.tokens(1, "d", 3, [Finished(X, FinishReason.LENGTH)])
    text, [end] = pair.flush()
    assert text == "d" and (end.reason, end.output_tokens) == (FinishReason.LENGTH, 4)


def test_nothing_returns_before_the_last_of_its_old_tokens(pair: Pair) -> None:
    pair.only(0)
    pair.admit()
    pair.only(1)
    pair.lanes.leave(0)
    pair.only(0)
    pair.lanes.leave(1)
    assert len(pair.taken(1)) == 1 and len(pair.taken(0)) == 1, "0 still runs it"
    pair.lanes.heard(0, 1.0, 5.0)
    pair.lanes.leave(1)
    assert pair.taken(0) == [Abort(X)]
    pair.tokens(0, "a", finished=[Finished(X, FinishReason.ABORT)])
    pair.lanes.leave(1)
    assert pair.taken(0) == [again("")]
    pair.tokens(0, "b")
    assert pair.flush() == ("b", [])


def test_an_abort_without_an_answer_is_over_after_a_while(pair: Pair) -> None:
    pair.only(0)
    pair.admit()
    pair.only(1)
    pair.lanes.leave(0)
    pair.lanes.heard(0, 1.0, 5.0)
    pair.only(0)
    pair.taken(0)
    for now_s, count in ((6.0, 0), (6.1, 1)):
        pair.lanes.heard(0, now_s, 5.0)
        pair.lanes.leave(1)
        assert len(pair.taken(0)) == count


def test_a_restarted_scheduler_gets_what_it_had_and_nothing_else(pair: Pair) -> None:
    pair.only(0)
    pair.admit()
    pair.only(1)
    pair.admit(X + 1)
    pair.tokens(0, "a")
    pair.taken(0)
    pair.lanes.renewed(0)
    assert pair.taken(0) == [again("a")]


def test_only_once_for_want_of_workers(pair: Pair) -> None:
    """It may be what kills them."""
    pair.only(0)
    pair.admit()
    pair.only(1)
    pair.lanes.leave(0, starved=True)
    assert pair.taken(1) == [again("")]
    pair.lanes.heard(0, 1.0, 5.0)
    pair.lanes.heard(0, 9.0, 5.0)
    pair.only(0)
    pair.taken(0)
    pair.lanes.leave(1, starved=True)
    assert not pair.taken(0)
    pair.lanes.leave(1)
    assert pair.taken(0) == [again("")], "a scheduler that goes is another matter"


def test_a_full_link_keeps_moves_in_order(pair: Pair) -> None:
    pair.only(0)
    pair.admit()
    pair.only(1)
    pair.full = True
    pair.lanes.leave(0)
    pair.streams.abort(X)
    pair.full = False
    pair.flush()
    assert [type(message) for message in pair.taken(1)] == [Admit, Abort]


def test_load_is_that_of_others_and_our_own(pair: Pair) -> None:
    pair.lanes.lane(0).told(Load(running=40, waiting=10, blocks_total=100), MODEL)
    pair.lanes.lane(1).told(Load(running=1, blocks_total=100), MODEL)
    for number in range(10):
        pair.admit(X + number)
    assert (len(pair.taken(0)), len(pair.taken(1))) == (0, 10)
    assert pair.lanes.lane(1).num_open == 11
    pair.lanes.lane(1).told(Load(running=11, blocks_total=100), None)
    assert pair.lanes.lane(1).num_open == 11


def test_a_prompt_goes_where_it_fits(pair: Pair) -> None:
    small, large = pair.lanes.lane(0), pair.lanes.lane(1)
    small.told(Load(blocks_total=1), ModelFacts("m", "llama", 257, 100, (256,), 16, 1))
    large.told(Load(running=90, blocks_total=100), MODEL)
    assert pair.lanes.choose(pack_i32(range(10)), "", 1) is small
    assert pair.lanes.choose(pack_i32(range(16)), "", 1) is large
    pair.takers, pair.speakers = [], [0]
    assert pair.lanes.choose(pack_i32(range(16)), "", 1) is small, "it waits where somebody answers"
    pair.speakers = []
    assert pair.lanes.choose(b"", "", 1) is small


ASKED = Admit(X, pack_i32(list(b"hi")), Sampling(50, seed=3), origin=OLD, attach=True)


def test_a_dead_tokenizers_sequence_is_looked_for_everywhere(pair: Pair) -> None:
    pair.admit(origin=OLD, delivered_tokens=1, delivered_chars=1)
    assert pair.taken(0) == pair.taken(1) == [ASKED]
    pair.streams.refused(Refused(X, "not_found", ""), 0)
    assert not pair.taken(0) and not pair.taken(1), "the other one has not answered"
    pair.tokens(1, "abc")
    pair.tokens(1, "d", 3)
    assert pair.flush() == ("bcd", [])
    assert pair.taken(0) == [Abort(OLD)] and not pair.taken(1)
    pair.streams.abort(X)
    assert pair.taken(1) == [Abort(X)] and not pair.taken(0)


def test_the_first_of_two_copies_is_the_one(pair: Pair) -> None:
    pair.admit(origin=OLD)
    pair.tokens(1, "ab")
    pair.tokens(0, "xyz")
    assert pair.flush() == ("ab", [])
    assert pair.taken(0)[1:] == [Abort(OLD)]


def test_one_that_had_ended_there(pair: Pair) -> None:
    pair.admit(origin=OLD)
    pair.tokens(0, "", finished=[Finished(X, FinishReason.LENGTH)])
    assert [end.reason for end in pair.flush()[1]] == [FinishReason.LENGTH]
    assert pair.streams.open_requests == 0 and not pair.lanes.lane(1).asked


def test_one_that_nobody_has_is_admitted_anew(pair: Pair) -> None:
    pair.admit(origin=OLD)
    pair.taken(0), pair.taken(1)
    pair.streams.refused(Refused(X, "not_found", ""), 0)
    pair.only(0)
    pair.streams.refused(Refused(X, "not_found", ""), 1)
    assert pair.taken(0) == [again("", origin=OLD)]
    assert pair.taken(1) == [Abort(OLD)], "the dead tokenizer's last words may yet come there"
    pair.tokens(0, "a")
    assert pair.flush() == ("a", [])


@pytest.mark.parametrize("how", ["renewed", "lost"])
def test_a_scheduler_that_has_gone_does_not_have_it(pair: Pair, how: str) -> None:
    pair.admit(origin=OLD)
    pair.taken(1)
    pair.streams.refused(Refused(X, "not_found", ""), 1)
    pair.only(1)
    if how == "renewed":
        pair.lanes.renewed(0)
    else:
        pair.lanes.leave(0)
    assert pair.taken(1) == [again("", origin=OLD)]


def test_a_successor_may_answer_what_its_predecessor_was_asked(pair: Pair) -> None:
    """It reads the same link, and may have got the sequence from the dead tokenizer's last words."""
    pair.admit(origin=OLD)
    pair.taken(0), pair.taken(1)
    pair.lanes.renewed(1)
    pair.tokens(1, "ab")
    assert pair.flush() == ("ab", [])
    assert pair.taken(0) == [Abort(OLD)]
    pair.streams.refused(Refused(X, "not_found", ""), 0)
    assert not pair.taken(0) and not pair.taken(1)


def test_who_owes_an_answer_gets_it_only_after_its_last_word(pair: Pair) -> None:
    """It may take the sequence over yet, read the Abort, and its end would be taken for that of a later admission."""
    pair.admit(origin=OLD)
    pair.taken(0), pair.taken(1)
    pair.tokens(1, "a")
    pair.lanes.heard(0, 1.0, 5.0)
    assert pair.taken(0) == [Abort(OLD), Abort(X)]
    pair.only(0)
    pair.lanes.leave(1)
    assert not pair.taken(0)
    pair.tokens(0, "", finished=[Finished(X, FinishReason.ABORT)])
    assert pair.flush() == ("a", [])
    pair.lanes.leave(1)
    assert pair.taken(0) == [again("a", origin=OLD)]


def test_what_a_predecessor_was_told_to_end_does_not_return_to_its_successor_at_once(pair: Pair) -> None:
    """That reads what was on its way: an admission, then its Abort, whose answer comes later."""
    pair.only(0)
    pair.admit()
    pair.only(1)
    pair.lanes.leave(0)
    pair.lanes.heard(0, 1.0, 5.0)
    pair.lanes.renewed(0)
    pair.lanes.heard(0, 1.1, 5.0)
    pair.only(0)
    pair.lanes.leave(1)
    assert not any(isinstance(message, Admit) and message.again for message in pair.taken(0))
    pair.tokens(0, "", finished=[Finished(X, FinishReason.ABORT)])
    assert pair.flush() == ("", [])
    pair.lanes.leave(1)
    assert pair.taken(0) == [again("")]


def test_a_scheduler_that_drains_still_answers(pair: Pair) -> None:
    pair.admit(origin=OLD)
    pair.taken(1)
    pair.streams.refused(Refused(X, "not_found", ""), 1)
    pair.only(1)
    pair.lanes.leave(0, answers=True)
    assert not pair.taken(1)
    pair.tokens(0, "ab")
    pair.lanes.leave(0, answers=True)
    assert pair.taken(1) == [Abort(OLD), again("ab", origin=OLD)]


def test_an_answer_to_a_question_that_has_become_idle_is_no_refusal(pair: Pair) -> None:
    pair.admit(origin=OLD)
    pair.streams.refused(Refused(X, "not_found", ""), 1)
    pair.only(0)
    pair.lanes.renewed(0)
    pair.streams.refused(Refused(X, "not_found", "to what the predecessor was asked"), 0)
    pair.tokens(0, "a")
    assert pair.flush() == ("a", [])


def test_a_client_that_leaves_while_it_is_looked_for(pair: Pair) -> None:
    pair.admit(origin=OLD)
    pair.streams.abort(X)
    assert pair.taken(0)[1:] == pair.taken(1)[1:] == [Abort(X)]
    pair.tokens(1, "a")
    pair.streams.refused(Refused(X, "not_found", ""), 0)
    assert pair.streams.open_requests == 0 and len(pair.flush()[1]) == 1


def test_a_token_that_does_not_exist_from_one_that_was_asked(pair: Pair) -> None:
    pair.admit(origin=OLD)
    batch = TokenBatch(pack_u64([X]), pack_i32([0]), pack_i32([257]), [])
    pair.streams.take(batch, 1)
    assert [end.reason for end in pair.flush()[1]] == [FinishReason.ERROR]
    assert pair.taken(1)[-1] == Abort(X)
