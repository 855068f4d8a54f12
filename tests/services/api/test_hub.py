from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from common.columns import pack_i32, pack_u64
from common.errors import Reject, RejectReason
from common.protocol import (
    Abort,
    Detokenize,
    Detokenized,
    FinishReason,
    Options,
    Pause,
    Peer,
    PromptKind,
    Refused,
    Sampling,
    Submit,
    TextBatch,
    TextFinished,
    Tokenize,
    Tokenized,
    api_of,
    tokenizer_of,
)
from common.recorder import Kind
from common.text_format import Beams
from services.api import slow
from services.api.figures import Figures
from services.api.hub import Hub, Request
from services.api.routes import Routes
from services.api.schema.replies import usage_of
from tests.services.api.system import rows

A, B = Peer("tokenizer", 0, 100, ""), Peer("tokenizer", 1, 200, "")


class Consumer:
    def __init__(self, request: Request) -> None:
        self.updates = 0
        request.consumer = self

    def update(self) -> None:
        self.updates += 1

    def keep_alive(self) -> None:
        raise AssertionError


class Rig:
    def __init__(self, max_open: int = 8, accept: Callable[[int, Any], bool] = lambda peer, message: True) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.figures = Figures()
        self.accept = accept
        self.hub = Hub(Routes(3, 0xABCD), max_open, self.send, self.figures, 30.0)

    def send(self, peer: int, message: Any) -> bool:
        self.sent.append((peer, message))
        return self.accept(peer, message)

    def open(self, n: int = 1, prompts: int = 1, limit: int = 4, peers: tuple[Peer, ...] = (A,)) -> Request:
        submit = Submit(0, PromptKind.TEXT, Sampling(16), text="x", n=n)
        request = self.hub.open([submit] * prompts, list(peers), 1.0, limit)
        Consumer(request)
        return request

    def end(self, seq_id: int, reason: FinishReason = FinishReason.EOS, tokens: int = 0, **more: Any) -> None:
        self.hub.feed(rows(finished=(TextFinished(seq_id, reason, 5, tokens, 2, **more),)), 9.0)
        self.hub.flush()

    @property
    def aborted(self) -> list[int]:
        return [message.seq_id for _, message in self.sent if isinstance(message, Abort)]


def updates(request: Request) -> int:
    assert isinstance(request.consumer, Consumer)
    return request.consumer.updates


def test_choices_own_consecutive_ids_that_carry_the_route() -> None:
    rig = Rig()
    request = rig.open(n=3, prompts=2, peers=(B,))
    ids = [choice.seq_id for choice in request.choices]
    assert ids == list(range(ids[0], ids[0] + 6))
    assert {api_of(seq_id) for seq_id in ids} == {3} and {tokenizer_of(seq_id) for seq_id in ids} == {1}
    assert [message.seq_id for _, message in rig.sent] == [ids[0], ids[3]]
    assert [choice.index for choice in request.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.first for choice in request.choices] == [ids[0]] * 3 + [ids[3]] * 3


def test_text_is_collected_in_order_and_told_once_per_flush() -> None:
    rig = Rig()
    request = rig.open(n=2)
    first, second = request.choices
    rig.hub.feed(rows((first.seq_id, 0, 1, "a"), (second.seq_id, 0, 2, "x")), 2.0)
    rig.hub.feed(rows((first.seq_id, 1, 2, "b")), 3.0)
    rig.hub.flush()
    rig.hub.flush()
    assert updates(request) == 1
    assert request.updated == [first, second]
    assert (first.take(), second.take(), first.take()) == ("ab", "x", "")


def test_an_empty_text_counts_its_tokens_and_makes_no_news() -> None:
    rig = Rig()
    request = rig.open()
    rig.hub.feed(rows((request.choices[0].seq_id, 0, 1, "")), 2.0)
    rig.hub.flush()
    assert request.choices[0].received == 1 and updates(request) == 0 and not request.updated


def test_a_whole_request_is_told_only_at_its_end() -> None:
    rig = Rig()
    request = rig.open(n=2, limit=0)
    for choice in request.choices:
        for index in range(100):
            rig.hub.feed(rows((choice.seq_id, index, 1, "a")), 2.0)
        rig.hub.flush()
    assert updates(request) == 0
    rig.end(request.choices[0].seq_id)
    assert updates(request) == 0
    rig.end(request.choices[1].seq_id)
    assert updates(request) == 1 and request.choices[0].take() == "a" * 100


def test_exactly_one_terminal() -> None:
    rig = Rig()
    request = rig.open()
    seq_id = request.choices[0].seq_id
    rig.end(seq_id, FinishReason.STOP_STRING, 3, stop_string="END")
    first = request.choices[0].finished
    rig.end(seq_id, FinishReason.LENGTH)
    rig.hub.cancel(request)
    assert request.choices[0].finished is first is not None and request.open == 0 and not rig.hub.choices
    assert rig.figures.unknown_results == 1 and not rig.aborted
    assert rig.figures.at(0).finished == {"stop": 1, "length": 0, "abort": 0, "error": 0, "repetition": 0}


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 1), (0, 2), (1, 0 + 1)])
def test_repeats_are_dropped(first: int, count: int) -> None:
    rig = Rig()
    request = rig.open()
    seq_id = request.choices[0].seq_id
    rig.hub.feed(rows((seq_id, 0, 1, "a"), (seq_id, 1, 1, "b")), 2.0)
    rig.hub.feed(rows((seq_id, first, count, "again")), 3.0)
    assert request.choices[0].take() == "ab" and request.open == 1 and request.choices[0].received == 2


def test_a_row_without_tokens_releases_text_that_was_held_back() -> None:
    rig = Rig()
    request = rig.open()
    seq_id = request.choices[0].seq_id
    rig.hub.feed(rows((seq_id, 0, 1, "a"), (seq_id, 1, 0, "b")), 2.0)
    rig.hub.feed(rows((seq_id, 0, 0, "?")), 2.0)
    assert request.choices[0].take() == "ab" and request.choices[0].received == 1 and request.failure is None
    assert sum(rig.figures.at(0).inter_token.counts) == 0


@pytest.mark.parametrize(("first", "count"), [(3, 1), (1, 2), (3, 0), (2, -1), (-1, 1)])
def test_a_gap_or_nonsense_ends_the_request_with_an_error(first: int, count: int) -> None:
    rig = Rig()
    request = rig.open(n=2)
    seq_id = request.choices[0].seq_id
    rig.hub.feed(rows((seq_id, 0, 2, "ab")), 2.0)
    rig.hub.feed(rows((seq_id, first, count, "?")), 3.0)
    rig.hub.flush()
    assert request.failure is not None and request.failure.reason is RejectReason.INTERNAL
    assert [choice.finished.reason for choice in request.choices if choice.finished] == [FinishReason.ERROR] * 2
    assert rig.aborted == [choice.seq_id for choice in request.choices]
    assert request.choices[0].take() == "ab" and updates(request) == 1


@pytest.mark.parametrize(
    "batch",
    [
        TextBatch(pack_u64([1]), pack_i32([0]), pack_i32([1]), ["a", "b"], []),
        TextBatch(b"123", pack_i32([0]), pack_i32([1]), ["a"], []),
        TextBatch(pack_u64([1]), b"", pack_i32([1]), ["a"], []),
    ],
)
def test_columns_that_disagree_are_counted_and_dropped(batch: TextBatch) -> None:
    rig = Rig()
    rig.hub.feed(batch, 1.0)
    assert rig.figures.unknown_results == 1


def test_rows_ends_and_answers_of_nobody_are_counted() -> None:
    rig = Rig()
    rig.hub.feed(rows((77, 0, 1, "a"), finished=(TextFinished(78, FinishReason.EOS, 1, 1),)), 1.0)
    rig.hub.refuse(Refused(79, "invalid", "no"))
    rig.hub.answer(Tokenized(80, b""))
    assert rig.figures.unknown_results == 4


def test_more_choices_than_room_are_refused_before_anything_is_sent() -> None:
    rig = Rig(max_open=4)
    request = rig.open(n=3)
    with pytest.raises(Reject) as caught:
        rig.open(n=2)
    assert caught.value.reason is RejectReason.OVERLOADED and len(rig.sent) == 1 and rig.figures.refused == 1
    rig.hub.cancel(request)
    assert rig.open(n=2, prompts=2).open == 4


def test_a_full_link_refuses_and_leaves_nothing_open() -> None:
    rig = Rig(accept=lambda peer, message: not isinstance(message, Submit) or message.seq_id & 1 == 0)
    with pytest.raises(Reject) as caught:
        rig.open(prompts=2)
    assert caught.value.reason is RejectReason.OVERLOADED and not rig.hub.choices and len(rig.aborted) == 2
    assert rig.hub.routes.work[A.incarnation] == 0


def test_the_tokenizer_with_the_least_open_work_is_picked_and_idle_ones_take_turns() -> None:
    rig = Rig(max_open=100)
    big = rig.open(n=3, peers=(A, B))
    assert [rig.open(peers=(A, B)).choices[0].tokenizer for _ in range(3)] == [200, 200, 200]
    rig.hub.cancel(big)
    assert rig.open(peers=(A, B)).choices[0].tokenizer == 100
    idle = Rig()
    picked = []
    for _ in range(4):
        request = idle.open(peers=(A, B))
        picked.append(request.choices[0].tokenizer)
        idle.end(request.choices[0].seq_id)
    assert picked == [100, 200, 100, 200]


def test_cancel_aborts_what_is_not_finished_on_the_link_of_its_submit() -> None:
    rig = Rig()
    request = rig.open(n=3)
    rig.end(request.choices[1].seq_id)
    rig.hub.cancel(request)
    rig.hub.cancel(request)
    assert rig.aborted == [request.choices[0].seq_id, request.choices[2].seq_id]
    assert rig.figures.at(0).finished["abort"] == 2 and request.failure is None
    assert all(peer == A.incarnation for peer, _ in rig.sent)


def test_a_slow_client_is_paused_then_cut_and_others_are_not() -> None:
    rig = Rig()
    slow, quick = rig.open(limit=4), rig.open(limit=4)
    for index in range(10):
        batch = rows((slow.choices[0].seq_id, index, 1, "s"), (quick.choices[0].seq_id, index, 1, "q"))
        rig.hub.feed(batch, 2.0)
        rig.hub.flush()
        quick.choices[0].take()
    assert slow.failure is not None and "unread" in slow.failure.message and quick.failure is None
    assert rig.aborted == [slow.choices[0].seq_id] and len(slow.choices[0].parts) == 9
    assert rig.figures.slow_clients == 1 and rig.figures.unknown_results == 1
    # Told at the fifth row, and again while rows come all the same.
    origin = slow.choices[0].origin
    assert [message for peer, message in rig.sent if peer == 0] == [Pause(origin, True)] * 2
    assert rig.figures.pauses == 1 and not quick.paused


def test_a_paused_request_goes_on_when_all_of_it_was_taken() -> None:
    rig = Rig()
    request = rig.open(n=2, limit=2)
    ended, unread = request.choices
    rig.end(ended.seq_id)
    rig.hub.feed(rows(*((unread.seq_id, index, 1, "s") for index in range(3))), 2.0)
    assert request.paused
    rig.accept = lambda peer, message: False
    slow.go_on(request, rig.send)
    assert request.paused  # the link was full: to be tried again
    rig.accept = lambda peer, message: True
    slow.go_on(request, rig.send)
    slow.go_on(request, rig.send)
    assert not request.paused
    told = [message for peer, message in rig.sent if peer == 0]
    assert told == [Pause(unread.origin, True), Pause(unread.origin, False), Pause(unread.origin, False)]


def test_a_request_is_accepted_when_each_of_its_prompts_is() -> None:
    rig = Rig()
    request = rig.open(n=2, prompts=2)
    first, _, second, _ = request.choices
    batch = msgspec.structs.replace(rows(), accepted=pack_u64((first.seq_id, 12345)) + b"odd")
    rig.hub.feed(batch, 2.0)
    rig.hub.flush()
    assert not request.accepted and updates(request) == 1
    rig.hub.feed(rows((second.seq_id, 0, 1, "a")), 2.0)
    assert request.accepted


def test_a_refusal_fails_the_whole_request_and_aborts_only_its_other_prompts() -> None:
    rig = Rig()
    request = rig.open(n=2, prompts=2)
    rig.hub.refuse(Refused(request.choices[2].seq_id, "too_long", "4097 tokens", "prompt"))
    rig.hub.flush()
    assert request.failure is not None
    assert (request.failure.reason, request.failure.param) == (RejectReason.TOO_LONG, "prompt")
    assert rig.aborted == [request.choices[0].seq_id, request.choices[1].seq_id]
    assert request.open == 0 and not rig.hub.choices and updates(request) == 1


def test_an_error_keeps_its_kind() -> None:
    rig = Rig()
    request = rig.open()
    rig.end(request.choices[0].seq_id, FinishReason.ERROR, message="no memory", code="out_of_memory")
    assert request.failure is not None and request.failure.reason is RejectReason.OUT_OF_MEMORY


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_an_error_of_one_choice_ends_the_request(reason: FinishReason) -> None:
    rig = Rig()
    request = rig.open(n=2)
    rig.end(request.choices[0].seq_id, reason, message="the worker died")
    assert request.failure is not None and request.failure.message == "the worker died"
    assert rig.aborted == [request.choices[1].seq_id] and updates(request) == 1


def test_a_lost_tokenizer_ends_its_calls_and_moves_its_choices() -> None:
    rig = Rig()
    lost, kept = rig.open(peers=(A,)), rig.open(peers=(B,))
    answers: list[Any] = []
    rig.hub.call(Tokenize(0, PromptKind.TEXT, "x"), [A], answers.append)
    old = lost.choices[0].seq_id
    rig.hub.feed(rows((old, 0, 2, "ab"), (old, 2, 1, "")), 2.0)
    lost.choices[0].take()
    rig.hub.lose(A.incarnation, 5.0)
    assert isinstance(answers[0], Reject) and not rig.hub.calls
    rig.hub.recover([B], 5.0)
    peer, again = rig.sent[-1]
    assert peer == B.incarnation and tokenizer_of(again.seq_id) == 1 and again.text == "x"
    assert (again.origin, again.delivered_tokens, again.delivered_chars) == (old, 3, 2)
    assert A.incarnation not in rig.hub.routes.work and rig.hub.routes.work == {0: 0, B.incarnation: 2}
    rig.hub.feed(rows((old, 3, 1, "late"), (again.seq_id, 3, 1, "c")), 6.0)
    rig.end(again.seq_id, tokens=4)
    assert lost.choices[0].take() == "c" and lost.open == 0 and lost.failure is kept.failure is None
    assert list(rig.hub.requests()) == [kept] and rig.hub.recovered == 1
    assert (rig.figures.prompt_tokens, rig.figures.output_tokens) == (5, 4)


def test_choices_move_one_by_one_with_their_own_seeds_and_finished_ones_stay() -> None:
    rig = Rig()
    request = rig.hub.open([Submit(0, PromptKind.TEXT, Sampling(16, seed=2**64 - 1), n=3)], [A], 1.0)
    rig.end(request.choices[0].seq_id, tokens=2)
    rig.hub.lose(A.incarnation, 5.0)
    rig.hub.recover([A, B], 5.0)
    moved = [message for _, message in rig.sent[1:]]
    assert [(m.n, m.sampling.seed, m.origin) for m in moved] == [
        (1, seed, choice.origin) for seed, choice in enumerate(request.choices[1:])
    ]
    for message in moved:
        rig.end(message.seq_id, tokens=3)
    usage = usage_of(request)
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 8) and not rig.hub.choices


def test_choices_wait_for_a_tokenizer_and_fail_when_none_comes_in_time() -> None:
    rig = Rig()
    request = rig.open(n=2)
    rig.hub.lose(A.incarnation, 5.0)
    rig.hub.recover([], 35.0)
    assert request.failure is None and request.open == 2
    rig.hub.recover([], 35.1)
    rig.hub.flush()
    assert request.failure is not None and request.failure.reason is RejectReason.UNAVAILABLE
    assert rig.aborted == [choice.origin for choice in request.choices] and updates(request) == 1
    assert rig.sent[-1][0] == 0, "the scheduler hears of it: there is no tokenizer that could tell it"
    rig.hub.recover([B], 36.0)
    assert len(rig.sent) == 3 and not rig.hub.choices


def test_a_second_death_moves_it_again_from_where_it_is() -> None:
    rig = Rig()
    request = rig.open()
    (choice,) = request.choices
    rig.hub.lose(A.incarnation, 5.0)
    rig.hub.recover([B], 5.0)
    rig.hub.feed(rows((choice.seq_id, 0, 2, "ab")), 6.0)
    rig.hub.lose(B.incarnation, 7.0)
    third = Peer("tokenizer", 0, 300, "")
    rig.hub.recover([third], 7.0)
    again = rig.sent[-1][1]
    assert (again.origin, again.delivered_tokens, again.delivered_chars) == (choice.origin, 2, 2)
    assert choice.tokenizer == 300 and list(rig.hub.choices) == [again.seq_id]


def test_a_choice_that_is_moved_too_early_waits_on() -> None:
    rig = Rig()
    request = rig.open()
    rig.hub.lose(A.incarnation, 5.0)
    rig.hub.recover([B], 5.0)
    rig.hub.refuse(Refused(request.choices[0].seq_id, "unavailable", "still loading"))
    assert request.failure is None
    rig.hub.recover([B], 6.0)
    assert len(rig.sent) == 3 and request.choices[0].tokenizer == B.incarnation
    rig.hub.refuse(Refused(request.choices[0].seq_id, "too_long", "no"))
    assert request.failure is not None and not rig.hub.choices and not rig.aborted


def test_a_late_choice_takes_its_sibling_with_it() -> None:
    rig = Rig()
    request = rig.open(n=2)
    first, second = request.choices
    rig.hub.lose(A.incarnation, 5.0)
    first.lost_s, second.lost_s = 5.0, 1000.0
    rig.hub.recover([B], 1000.0)
    assert request.failure is not None and not rig.hub.choices


def test_time_without_a_worker_does_not_count() -> None:
    """Tokenizer and worker lost together: loading the model may take longer than a tokenizer is waited for."""
    rig = Rig()
    request = rig.open()
    rig.hub.lose(A.incarnation, 5.0)
    for now_s in range(10, 1000, 10):
        rig.hub.recover(None, float(now_s))
    rig.hub.recover([], 1000.0)
    assert request.failure is None
    rig.hub.recover([B], 1001.0)
    assert request.failure is None and request.choices[0].tokenizer == B.incarnation


def test_a_full_link_leaves_it_waiting() -> None:
    rig = Rig()
    request = rig.open()
    rig.hub.lose(A.incarnation, 5.0)
    rig.accept = lambda peer, message: False
    rig.hub.recover([B], 5.0)
    assert request.choices[0].tokenizer == 0 and request.choices[0].seq_id == request.choices[0].origin
    rig.accept = lambda peer, message: True
    rig.hub.recover([B], 6.0)
    assert request.choices[0].tokenizer == B.incarnation and rig.hub.routes.work == {0: 0, B.incarnation: 1}


def test_text_of_the_dead_that_is_still_on_its_way_counts() -> None:
    rig = Rig()
    request = rig.open()
    (choice,) = request.choices
    rig.hub.lose(A.incarnation, 5.0)
    rig.hub.feed(rows((choice.seq_id, 0, 1, "a")), 5.0)
    rig.hub.recover([B], 5.0)
    assert rig.sent[-1][1].delivered_tokens == 1
    other = rig.open()
    rig.hub.lose(A.incarnation, 6.0)
    rig.end(other.choices[0].seq_id)
    rig.hub.recover([B], 6.0)
    assert other.failure is None and other.open == 0 and rig.hub.routes.work[0] == 0


def test_what_was_aborted_at_a_tokenizer_that_died_is_aborted_at_the_scheduler() -> None:
    rig = Rig()
    request = rig.open()
    rig.hub.cancel(request)
    rig.hub.lose(A.incarnation, 5.0)
    assert rig.sent[-1] == (0, Abort(request.choices[0].origin))


def test_a_client_that_leaves_during_the_pause_frees_everything() -> None:
    rig = Rig()
    request = rig.open(n=2)
    rig.hub.lose(A.incarnation, 5.0)
    rig.hub.cancel(request)
    assert [(peer, m.seq_id) for peer, m in rig.sent[1:]] == [(0, choice.origin) for choice in request.choices]
    rig.hub.recover([B], 6.0)
    assert len(rig.sent) == 3 and not rig.hub.choices and rig.hub.routes.work[0] == 0


def test_new_requests_may_wait_for_a_tokenizer_too() -> None:
    rig = Rig()
    request = rig.hub.open([Submit(0, PromptKind.TEXT, Sampling(16, seed=4), n=2)], [], 1.0)
    assert rig.sent == [] and request.open == 2
    rig.hub.recover([B], 3.0)
    assert [(m.sampling.seed, m.n, m.delivered_tokens) for _, m in rig.sent] == [(4, 1, 0), (5, 1, 0)]


def test_fail_and_end_of_a_finished_request_change_nothing() -> None:
    rig = Rig()
    request = rig.open()
    rig.end(request.choices[0].seq_id)
    rig.hub.fail(request, Reject(RejectReason.INTERNAL, "late"))
    assert request.failure is None


def test_calls_are_answered_once() -> None:
    rig = Rig(max_open=2)
    answers: list[Any] = []
    rig.hub.call(Tokenize(0, PromptKind.TEXT, "x"), [A], answers.append)
    rig.hub.call(Detokenize(0, b""), [A], answers.append)
    with pytest.raises(Reject):
        rig.hub.call(Detokenize(0, b""), [A], answers.append)
    tokenize, detokenize = (message.call_id for _, message in rig.sent)
    rig.hub.answer(Detokenized(detokenize, "text"))
    rig.hub.answer(Detokenized(detokenize, "text"))
    rig.hub.refuse(Refused(tokenize, "no such reason", "why"))
    assert answers[0] == Detokenized(detokenize, "text") and answers[1].reason is RejectReason.INTERNAL
    assert len(answers) == 2 and rig.hub.routes.work[A.incarnation] == 0


def test_a_call_that_cannot_be_sent_is_refused() -> None:
    rig = Rig(accept=lambda peer, message: False)
    with pytest.raises(Reject):
        rig.hub.call(Detokenize(0, b""), [A], lambda answer: None)
    assert not rig.hub.calls


def test_figures_of_a_request() -> None:
    rig = Rig()
    request = rig.open(n=2)
    for choice in request.choices:
        rig.hub.feed(rows((choice.seq_id, 0, 1, "a")), 1.5)
        rig.hub.feed(rows((choice.seq_id, 1, 4, "b")), 2.5)
        rig.end(choice.seq_id, FinishReason.LENGTH, 5)
    figures = rig.figures
    assert (figures.requests, figures.prompt_tokens, figures.cached_tokens, figures.output_tokens) == (1, 5, 2, 10)
    assert sum(figures.at(0).first_token.counts) == 2 and figures.at(0).first_token.total == 1.0
    assert sum(figures.at(0).inter_token.counts) == 8 and figures.at(0).inter_token.total == 2.0
    assert sum(figures.at(0).request.counts) == 2 and figures.at(0).request.total == 16.0


def test_gaps_between_tokens_are_those_of_each_choice() -> None:
    """Rows of one batch may have waited for different times, and bring several tokens."""
    rig = Rig()
    one, two, three = (rig.open().choices[0].seq_id for _ in range(3))
    rig.hub.feed(rows((one, 0, 1, "a"), (two, 0, 1, "a")), 2.0)
    rig.hub.feed(rows((three, 0, 1, "a")), 3.0)
    rig.hub.feed(rows((one, 1, 1, "b"), (three, 1, 1, "b"), (two, 1, 1, "b"), (three, 2, 2, "cd")), 3.5)
    gaps = rig.figures.at(0).inter_token
    counted = dict(zip((*gaps.bounds, None), gaps.counts, strict=True))
    assert (counted[0.5], counted[2.5], counted[0.001], sum(gaps.counts)) == (1, 2, 2, 5)
    assert gaps.total == 0.5 + 1.5 + 1.5


def test_what_a_choice_tells_belongs_to_the_scheduler_that_has_it() -> None:
    rig = Rig()
    first, second = (rig.open().choices[0] for _ in range(2))
    both = rows((first.seq_id, 0, 1, "a"), (second.seq_id, 0, 1, "a"))
    rig.hub.feed(msgspec.structs.replace(both, engines={second.seq_id: 2, 99: 1, first.seq_id: 64}), 2.0)
    rig.hub.feed(rows((first.seq_id, 1, 1, "b"), (second.seq_id, 1, 1, "b"), (first.seq_id, 2, 1, "c")), 4.0)
    for choice in (first, second):
        rig.end(choice.seq_id, tokens=choice.received)
    zero, two = rig.figures.at(0), rig.figures.at(2)
    assert rig.figures.engines.keys() == {0, 2}
    assert (sum(zero.first_token.counts), sum(two.first_token.counts)) == (1, 1)
    assert (sum(zero.inter_token.counts), sum(two.inter_token.counts)) == (2, 1)
    assert (zero.inter_token.total, two.inter_token.total) == (2.0, 2.0)
    assert (zero.per_token.total, two.per_token.total) == (1.0, 2.0)
    assert zero.finished["stop"] == two.finished["stop"] == 1
    assert (zero.longest_output.total, two.longest_output.total, two.max_tokens.total) == (3.0, 2.0, 16.0)


def test_ids_do_not_wrap_inside_a_request() -> None:
    rig = Rig()
    rig.hub.routes._counter = 2**32 - 1
    ids = [choice.seq_id for choice in rig.open(n=2).choices]
    assert ids[1] == ids[0] + 1 and ids[0] & 0xFFFFFFFF == 0


def test_what_happens_to_a_choice_is_recorded() -> None:
    rig, noted = Rig(), list[tuple[Any, ...]]()
    request = rig.open(n=2)
    request.record = lambda *event: noted.append(event)
    first, second = (choice.seq_id for choice in request.choices)
    rig.hub.feed(TextBatch(pack_u64([first]), pack_i32([0]), pack_i32([1]), ["a"], []), 2.0)
    rig.hub.feed(TextBatch(pack_u64([first]), pack_i32([1]), pack_i32([1]), ["b"], []), 2.1)
    rig.hub.lose(A.incarnation, 3.0)
    rig.hub.recover([B], 3.5)
    moved = [choice.seq_id for choice in request.choices]
    rig.hub.cancel(request)
    assert noted == [
        (Kind.FIRST_TEXT, first),
        (Kind.WAITING, first),
        (Kind.WAITING, second),
        (Kind.MOVED, moved[0], first),
        (Kind.MOVED, moved[1], second),
        (Kind.ANSWERED, moved[0], 2, 0, FinishReason.ABORT),
        (Kind.ANSWERED, moved[1], 0, 0, FinishReason.ABORT),
    ]


def test_a_beam_search_begins_anew_at_another_tokenizer() -> None:
    rig = Rig()
    submit = Submit(0, PromptKind.TEXT, Sampling(16), text="x", n=3, options=Options(beams=Beams(3)))
    request = rig.hub.open([submit, submit], [A], 1.0, 0)
    rig.hub.lose(A.incarnation, 5.0)
    rig.sent.clear()
    rig.hub.recover([B], 5.0)
    (to_b, first), (_, second) = rig.sent
    assert to_b == B.incarnation and rig.hub.recovered == 6
    for message, choices in ((first, request.choices[:3]), (second, request.choices[3:])):
        assert message == msgspec.structs.replace(submit, seq_id=choices[0].seq_id), "as it was"
        assert [choice.seq_id - message.seq_id for choice in choices] == [0, 1, 2]
        assert {choice.first for choice in choices} == {message.seq_id} and not any(each.moved for each in choices)
    for choice in list(request.choices):
        rig.end(choice.seq_id)
    assert request.open == 0 and not rig.hub.choices and usage_of(request).prompt_tokens == 10
