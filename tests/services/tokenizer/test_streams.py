from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.columns import pack_i32, pack_u64, unpack_i32, unpack_u64
from common.dialects.registry import REASONING, TOOLS, Dialects
from common.dialects.think import THINK
from common.errors import Reject, RejectReason
from common.logprobs import Report, TokenLogprobs, record_bytes
from common.protocol import (
    Abort,
    Admit,
    Finished,
    FinishReason,
    ModelFacts,
    Options,
    PromptKind,
    Refused,
    Sampling,
    Stop,
    Submit,
    TextBatch,
    TextFinished,
    TextFormat,
    TokenBatch,
    make_seq_id,
)
from common.text_format import Repetition
from common.vocabulary import Vocabulary
from services.api.logprobs import Reported
from services.tokenizer.encode import Prompt
from services.tokenizer.formats import Formats
from services.tokenizer.lanes import Lanes
from services.tokenizer.outbox import Outbox
from services.tokenizer.sequence import Request
from services.tokenizer.streams import Streams, box_key
from services.tokenizer.thinking import Thinking
from services.worker.null import record

EOS = 256
WORDS = Vocabulary([bytes([byte]) for byte in range(256)] + [b"</s>"], special=[EOS], lead_spaces=1)
MODEL = ModelFacts("m", "llama", 257, 100, (EOS,), 16, 10)
FIRST = make_seq_id(0, 0, 1, 0)


class Bench:
    """Streams whose links the test plays."""

    def __init__(self) -> None:
        self.to_scheduler: list[Any] = []
        self.to_api: list[Any] = []
        self.link_is_full = False
        self.streams = Streams(Lanes(self.send_up, lambda: [0], lambda: [0]))
        self.streams.speak(Formats(Dialects(None, None), WORDS))
        self.box = self.streams.boxes[box_key(FIRST)] = Outbox(1, 0.0)

    def send_up(self, scheduler: int, message: Any) -> bool:
        assert scheduler == 0
        if not self.link_is_full:
            self.to_scheduler.append(message)
        return not self.link_is_full

    def send_api(self, incarnation: int, message: Any) -> bool:
        if not self.link_is_full:
            self.to_api.append(message)
        return not self.link_is_full

    def open(self, seq_id: int = FIRST, **fields: Any) -> Request:
        sampling = fields.pop("sampling", Sampling(10))
        request = self.streams.open(Submit(seq_id, PromptKind.TEXT, sampling, **fields), self.box)
        assert request is not None
        return request

    def admit(self, seq_id: int = FIRST, prompt: bytes = b"hi", **fields: Any) -> Request:
        request = self.open(seq_id, **fields)
        self.streams.admit(request, Prompt(array("i", list(prompt))), MODEL)
        return request

    def take(self, *rows: tuple[int, int, int], finished: list[Finished] | None = None) -> None:
        """Rows are (seq_id, index, token)."""
        ids, index, tokens = zip(*rows, strict=True) if rows else ((), (), ())
        self.streams.take(TokenBatch(pack_u64(ids), pack_i32(index), pack_i32(tokens), finished or []), 0)

    def speak(self, text: str | bytes, seq_id: int = FIRST, start: int = 0) -> None:
        """One batch per byte."""
        for place, token in enumerate(text.encode() if isinstance(text, str) else text):
            self.take((seq_id, start + place, token))

    def flush(self) -> tuple[list[tuple[int, int, int, str]], list[TextFinished]]:
        """Rows (seq_id, first index, count, text) and terminals sent since the last call."""
        self.to_api.clear()
        assert self.streams.flush(self.send_api)
        rows: list[tuple[int, int, int, str]] = []
        ends: list[TextFinished] = []
        for batch in self.to_api:
            if isinstance(batch, TextBatch):
                columns = unpack_u64(batch.seq_ids), unpack_i32(batch.first_index), unpack_i32(batch.counts)
                rows += zip(*columns, batch.texts, strict=True)
                ends += batch.finished
        return rows, ends


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_request_is_admitted_as_it_was_submitted(bench: Bench) -> None:
    sampling = Sampling(5, seed=9)
    bench.admit(sampling=sampling, n=2, priority=3, cache_salt="salt")
    assert bench.to_scheduler == [Admit(FIRST, pack_i32(list(b"hi")), sampling, 2, 3, "salt")]
    assert bench.streams.open_requests == 1 and bench.streams.counts.prompt_tokens == 2


def test_max_tokens_that_was_not_given_is_what_the_model_leaves(bench: Bench) -> None:
    bench.admit(sampling=Sampling(0))
    assert bench.to_scheduler[0].sampling.max_tokens == 98


def test_batches_taken_together_are_one_row_per_sequence(bench: Bench) -> None:
    bench.admit()
    bench.admit(FIRST + 1)
    bench.speak("abc")
    bench.speak("x", FIRST + 1)
    bench.take((FIRST, 3, ord("d")), (FIRST + 1, 1, ord("y")))
    assert bench.flush() == ([(FIRST, 0, 4, "abcd"), (FIRST + 1, 0, 2, "xy")], [])
    bench.speak("e", start=4)
    assert bench.flush() == ([(FIRST, 4, 1, "e")], [])
    assert bench.streams.counts.output_tokens == 7


def test_each_api_gets_its_own_batch(bench: Bench) -> None:
    other = make_seq_id(1, 0, 2, 0)
    bench.admit()
    bench.box = bench.streams.boxes[box_key(other)] = Outbox(2, 0.0)
    bench.admit(other)
    bench.take((FIRST, 0, ord("a")), (other, 0, ord("b")))
    bench.flush()
    assert [batch.texts for batch in bench.to_api] == [["a"], ["b"]]


def test_a_character_is_shown_when_it_is_whole(bench: Bench) -> None:
    bench.admit()
    shown = []
    for place, token in enumerate("é".encode()):
        bench.take((FIRST, place, token))
        shown.append(bench.flush()[0])
    assert shown == [[(FIRST, 0, 1, "")], [(FIRST, 1, 1, "é")]]


def test_eos_counts_but_has_no_text(bench: Bench) -> None:
    bench.admit(skip_special_tokens=False)
    bench.take((FIRST, 0, ord("a")))
    bench.take((FIRST, 1, EOS), finished=[Finished(FIRST, FinishReason.EOS, EOS, cached_tokens=1)])
    rows, ends = bench.flush()
    assert rows == [(FIRST, 0, 2, "a")]
    assert ends == [TextFinished(FIRST, FinishReason.EOS, 2, 2, cached_tokens=1, stop_token=EOS)]
    assert bench.streams.open_requests == 0 and bench.streams.counts.cached_tokens == 1


@pytest.mark.parametrize(("include_stop", "text"), [(False, "aX"), (True, "aXX")])
def test_only_the_stop_token_at_the_end_is_hidden(bench: Bench, include_stop: bool, text: str) -> None:
    bench.admit(include_stop=include_stop)
    end = Finished(FIRST, FinishReason.STOP_TOKEN, ord("X"))
    bench.take((FIRST, 0, ord("a")), (FIRST, 1, ord("X")), (FIRST, 2, ord("X")), finished=[end])
    rows, [terminal] = bench.flush()
    assert rows == [(FIRST, 0, 3, text)] and terminal.output_tokens == 3 and terminal.stop_token == ord("X")


def test_last_token_of_a_length_end_is_text(bench: Bench) -> None:
    bench.admit()
    bench.take((FIRST, 0, ord("a")), finished=[Finished(FIRST, FinishReason.LENGTH)])
    rows, [terminal] = bench.flush()
    assert rows == [(FIRST, 0, 1, "a")] and terminal.reason == FinishReason.LENGTH


def test_unfinished_character_and_held_text_are_shown_at_the_end(bench: Bench) -> None:
    bench.admit(stop=("<END>",))
    bench.speak(b"a<E\xc3")
    assert bench.flush()[0] == [(FIRST, 0, 4, "a")]
    bench.take(finished=[Finished(FIRST, FinishReason.LENGTH)])
    rows, [terminal] = bench.flush()
    assert "".join(row[3] for row in rows) == "<E\ufffd" and sum(row[2] for row in rows) == 0
    assert terminal.output_tokens == 4


def test_stop_string_ends_the_sequence_here_and_there(bench: Bench) -> None:
    bench.admit(stop=("END", "###"))
    bench.to_scheduler.clear()
    bench.speak("one EN")
    bench.take((FIRST, 6, ord("D")), (FIRST, 7, ord("x")))
    rows, ends = bench.flush()
    assert rows == [(FIRST, 0, 7, "one ")]
    assert ends == [TextFinished(FIRST, FinishReason.STOP_STRING, 2, 7, stop_string="END")]
    assert bench.to_scheduler == [Stop(FIRST)]
    bench.take((FIRST, 8, ord("y")), finished=[Finished(FIRST, FinishReason.ABORT)])
    assert bench.flush() == ([], []) and bench.to_scheduler == [Stop(FIRST)]


def test_stop_string_inside_the_last_batch(bench: Bench) -> None:
    bench.admit(stop=("b",), include_stop=True)
    end = Finished(FIRST, FinishReason.EOS, EOS, cached_tokens=1)
    bench.take(*[(FIRST, place, token) for place, token in enumerate([*b"abc", EOS])], finished=[end])
    rows, ends = bench.flush()
    assert rows == [(FIRST, 0, 2, "ab")]
    assert ends == [TextFinished(FIRST, FinishReason.STOP_STRING, 2, 2, 1, stop_string="b")]
    assert len(bench.to_scheduler) == 1, "the scheduler has ended it already"


def test_no_stop_string_before_min_tokens(bench: Bench) -> None:
    bench.admit(stop=("a",), sampling=Sampling(10, min_tokens=3))
    bench.speak("aa")
    assert bench.flush() == ([(FIRST, 0, 2, "aa")], [])
    bench.speak("a", start=2)
    assert bench.flush()[1][0].reason == FinishReason.STOP_STRING


def test_repeats_are_dropped_and_gaps_end_the_sequence(bench: Bench) -> None:
    bench.admit()
    bench.speak("ab")
    bench.take((FIRST, 0, ord("a")), (FIRST, 1, ord("b")), (FIRST, 2, ord("c")))
    assert bench.flush()[0] == [(FIRST, 0, 3, "abc")]
    bench.take((FIRST, 5, ord("f")))
    [end] = bench.flush()[1]
    assert end.reason == FinishReason.ERROR and "3 to 4" in end.message and end.output_tokens == 3
    assert bench.to_scheduler[-1] == Abort(FIRST)


def test_the_kind_of_an_error_reaches_the_api(bench: Bench) -> None:
    bench.admit()
    bench.take(finished=[Finished(FIRST, FinishReason.ERROR, message="no memory", code="out_of_memory")])
    [end] = bench.flush()[1]
    assert (end.reason, end.message, end.code) == (FinishReason.ERROR, "no memory", "out_of_memory")


def test_tokens_that_do_not_exist_end_only_their_sequence(bench: Bench) -> None:
    bench.admit()
    bench.admit(FIRST + 1)
    bench.take((FIRST, 0, 257), (FIRST + 1, 0, ord("a")), (FIRST + 9, 0, -1))
    rows, [end] = bench.flush()
    assert rows == [(FIRST + 1, 0, 1, "a")]
    assert end.seq_id == FIRST and end.reason == FinishReason.ERROR and "257" in end.message


def test_batches_that_make_no_sense_are_counted(bench: Bench) -> None:
    bench.streams.take(TokenBatch(b"123", b"", b"", []), 0)
    bench.streams.take(TokenBatch(pack_u64([1]), pack_i32([1]), pack_i32([]), []), 0)
    bench.take((FIRST, 0, 1))
    assert bench.streams.counts.unknown_results == 3


def test_abort_ends_each_choice_once(bench: Bench) -> None:
    request = bench.admit(n=2)
    bench.speak("a", FIRST + 1)
    assert bench.streams.abort(FIRST + 1) is request and bench.streams.abort(FIRST + 1) is None
    bench.speak("b", FIRST + 1, 1)
    _, ends = bench.flush()
    assert [(end.seq_id, end.reason, end.output_tokens) for end in ends] == [(FIRST + 1, FinishReason.ABORT, 1)]
    assert bench.to_scheduler[1:] == [Abort(FIRST + 1)] and request.live == 1


def test_choice_aborted_while_its_prompt_was_encoded(bench: Bench) -> None:
    request = bench.open(n=2)
    bench.streams.abort(FIRST)
    assert bench.to_scheduler == [], "the scheduler does not know it yet"
    bench.streams.admit(request, Prompt(array("i", [1])), MODEL)
    assert [type(message) for message in bench.to_scheduler] == [Admit, Abort]
    assert bench.to_scheduler[1] == Abort(FIRST)


def test_refused_is_the_only_terminal_of_a_request(bench: Bench) -> None:
    request = bench.open(n=2)
    with pytest.raises(Reject) as caught:
        bench.streams.admit(request, Prompt(array("i", [1] * 95)), MODEL)
    bench.streams.refuse(request, caught.value)
    assert bench.flush() == ([], [])
    assert bench.to_api == [Refused(FIRST, "too_long", caught.value.message, "max_tokens")]
    assert bench.streams.open_requests == 0 and bench.streams.counts.refused == 1


def test_refusal_after_a_choice_had_its_terminal(bench: Bench) -> None:
    request = bench.open(n=2)
    bench.streams.abort(FIRST)
    bench.streams.refuse(request, Reject(RejectReason.INVALID, "why"))
    _, ends = bench.flush()
    assert [(end.reason, end.message) for end in ends] == [(FinishReason.ABORT, ""), (FinishReason.ERROR, "why")]


def test_scheduler_refuses(bench: Bench) -> None:
    bench.admit(n=2)
    bench.streams.refused(Refused(FIRST, "overloaded", "full"), 0)
    bench.streams.refused(Refused(FIRST, "overloaded", "full"), 0)
    bench.flush()
    assert bench.to_api == [Refused(FIRST, "overloaded", "full")]
    assert bench.streams.counts.unknown_results == 1


def test_full_scheduler_link_refuses_new_requests_and_delays_the_rest(bench: Bench) -> None:
    bench.admit(stop=("a",))
    request = bench.open(FIRST + 1)
    bench.link_is_full = True
    bench.speak("a")
    with pytest.raises(Reject) as caught:
        bench.streams.admit(request, Prompt(array("i", [1])), MODEL)
    assert caught.value.reason == RejectReason.OVERLOADED
    assert not bench.streams.flush(bench.send_api)
    bench.link_is_full = False
    _, ends = bench.flush()
    assert bench.to_scheduler[-1] == Stop(FIRST) and [end.reason for end in ends] == [FinishReason.STOP_STRING]


def test_new_scheduler_gets_every_open_sequence_with_its_output(bench: Bench) -> None:
    sampling = Sampling(10, seed=2**64 - 1)
    bench.admit(n=3, sampling=sampling, priority=1, cache_salt="s")
    bench.open(FIRST + 5)
    bench.speak("ab", FIRST + 1)
    bench.streams.abort(FIRST + 2)
    bench.to_scheduler.clear()
    bench.streams.lanes.renewed(0)
    prompt = pack_i32(list(b"hi"))
    assert bench.to_scheduler == [
        Admit(FIRST, prompt, sampling, 1, 1, "s", again=True),
        Admit(FIRST + 1, prompt, Sampling(10, seed=0), 1, 1, "s", pack_i32(list(b"ab")), again=True),
    ]
    bench.take((FIRST + 1, 1, ord("b")), (FIRST + 1, 2, ord("c")))
    assert (FIRST + 1, 0, 3, "abc") in bench.flush()[0]
    bench.streams.refused(Refused(FIRST, "overloaded", "its first admission, read late"), 0)
    assert bench.flush() == ([], [])
    bench.streams.refused(Refused(FIRST, "unavailable", "the server is shutting down"), 0)
    assert [(end.seq_id, end.reason) for end in bench.flush()[1]] == [(FIRST, FinishReason.ERROR)]


def test_api_that_left(bench: Bench) -> None:
    other = make_seq_id(1, 0, 2, 0)
    bench.admit()
    bench.open(FIRST + 1)
    bench.box = bench.streams.boxes[box_key(other)] = Outbox(2, 0.0)
    bench.admit(other)
    bench.to_scheduler.clear()
    bench.streams.drop(box_key(FIRST))
    bench.streams.drop(box_key(FIRST))
    bench.take((FIRST, 0, 1), (other, 0, ord("a")))
    assert bench.to_scheduler == [Abort(FIRST)] and bench.streams.open_requests == 1
    assert bench.flush() == ([(other, 0, 1, "a")], [])


OLD = make_seq_id(0, 7, 1, 40)


def moved(bench: Bench, tokens: int, chars: int, **fields: Any) -> None:
    """FIRST, which another tokenizer had as OLD until it died."""
    bench.admit(origin=OLD, delivered_tokens=tokens, delivered_chars=chars, **fields)


def test_a_moved_choice_names_its_origin_and_is_not_refused_for_load(bench: Bench) -> None:
    bench.link_is_full = True
    moved(bench, 0, 0)
    bench.link_is_full = False
    bench.flush()
    assert bench.to_scheduler == [Admit(FIRST, pack_i32(list(b"hi")), Sampling(10), origin=OLD)]
    bench.take((FIRST, 0, ord("a")))
    bench.streams.lanes.renewed(0)
    assert bench.to_scheduler[-1].output == pack_i32([ord("a")]) and bench.to_scheduler[-1].origin == OLD


def test_only_what_the_api_does_not_have_is_sent(bench: Bench) -> None:
    moved(bench, 3, 3)
    bench.take(*[(FIRST, place, token) for place, token in enumerate(b"abcde")])
    bench.speak("f", start=5)
    assert bench.flush() == ([(FIRST, 3, 3, "def")], [])
    bench.take((FIRST, 6, ord("g")), finished=[Finished(FIRST, FinishReason.LENGTH)])
    rows, ends = bench.flush()
    assert rows == [(FIRST, 6, 1, "g")] and ends[0].output_tokens == 7 and ends[0].prompt_tokens == 2


def test_a_moved_choice_that_had_ended(bench: Bench) -> None:
    moved(bench, 2, 2)
    bench.take(*[(FIRST, i, b"abc"[i]) for i in range(3)], finished=[Finished(FIRST, FinishReason.LENGTH)])
    rows, ends = bench.flush()
    assert rows == [(FIRST, 2, 1, "c")] and (ends[0].reason, ends[0].output_tokens) == (FinishReason.LENGTH, 3)


def test_a_moved_choice_that_is_aborted_before_it_is_admitted_ends_under_its_first_id(bench: Bench) -> None:
    bench.open(origin=OLD)
    bench.streams.abort(FIRST)
    assert bench.to_scheduler == [Abort(OLD)]


@given(
    st.lists(st.one_of(st.integers(97, 100), st.integers(0, 256)), min_size=1, max_size=20),
    st.data(),
    st.sampled_from([(), ("ab",), ("cc", "d")]),
)
def test_a_move_at_any_token_changes_no_text(tokens: list[int], data: st.DataObject, stop: tuple[str, ...]) -> None:
    """Half a character and half a stop string may lie across the seam."""

    def feed(bench: Bench, end: int) -> tuple[str, int, list[TextFinished]]:
        for place in range(end):
            last = place == len(tokens) - 1
            ended = [Finished(FIRST, FinishReason.LENGTH)] if last else []
            bench.take((FIRST, place, tokens[place]), finished=ended)
        rows, ends = bench.flush()
        return "".join(row[3] for row in rows), sum(row[2] for row in rows), ends

    alone, before, after = Bench(), Bench(), Bench()
    options: dict[str, Any] = {"stop": stop, "sampling": Sampling(50)}
    alone.admit(**options)
    before.admit(**options)
    whole = feed(alone, len(tokens))
    text, count, ended = feed(before, data.draw(st.integers(0, len(tokens))))
    if not ended:
        moved(after, count, len(text), **options)
        rest, more, ended = feed(after, len(tokens))
        text, count = text + rest, count + more
    assert (text, count, ended) == whole


def test_submit_that_is_open_already(bench: Bench) -> None:
    bench.open()
    assert bench.streams.open(Submit(FIRST, PromptKind.TEXT, Sampling(1)), bench.box) is None
    assert bench.streams.open_requests == 1


def test_leading_space_is_dropped_only_at_the_start_of_a_text(bench: Bench) -> None:
    bench.admit(prompt=b"hi")
    bench.speak(" a")
    assert bench.flush()[0] == [(FIRST, 0, 2, " a")]
    request = bench.open(FIRST + 1)
    bench.streams.admit(request, Prompt(array("i", [EOS])), MODEL)
    bench.speak(" a", FIRST + 1)
    assert bench.flush()[0] == [(FIRST + 1, 0, 2, "a")]


TOKENS = st.lists(st.one_of(st.integers(97, 100), st.integers(0, 256)), max_size=20)


@given(TOKENS, st.data(), st.sampled_from([(), ("ab",), ("cc", "d")]))
def test_any_batching_gives_the_same_text(tokens: list[int], data: st.DataObject, stop: tuple[str, ...]) -> None:
    """Rows one by one with a flush after each, and cut into batches of any size, repeats included."""

    def run(cuts: list[int]) -> tuple[str, int, TextFinished]:
        bench, text, count = Bench(), "", 0
        bench.admit(stop=stop, sampling=Sampling(50))
        for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            first = max(0, begin - 1)  # one row is sent twice
            rows = [(FIRST, place, tokens[place]) for place in range(first, end)]
            bench.take(*rows, finished=[Finished(FIRST, FinishReason.LENGTH)] if end == len(tokens) else [])
            sent, ends = bench.flush()
            for _, first_index, number, piece in sent:
                assert first_index == count
                count, text = count + number, text + piece
            if ends:
                assert ends[0].output_tokens == count
                return text, count, ends[0]
        raise AssertionError("no terminal")

    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens) - 1), max_size=5))) if tokens else []
    assert run(cuts) == run(list(range(len(tokens))))


def test_the_tenant_goes_along_and_acceptance_comes_back(bench: Bench) -> None:
    bench.admit(tenant="ann", weight=3)
    assert (bench.to_scheduler[0].tenant, bench.to_scheduler[0].weight) == ("ann", 3)
    bench.streams.lanes.renewed(0)
    assert (bench.to_scheduler[1].tenant, bench.to_scheduler[1].weight, bench.to_scheduler[1].again) == ("ann", 3, True)
    accepted = pack_u64((FIRST, FIRST + 9)) + b"odd"  # one that has ended, and a peer that cannot count
    bench.streams.take(TokenBatch(b"", b"", b"", [], accepted), 0)
    assert bench.flush() == ([], []) and bench.to_api[0].accepted == pack_u64((FIRST,))


def test_a_refusal_of_a_kind_that_is_not_known(bench: Bench) -> None:
    bench.admit()
    bench.streams.refused(Refused(FIRST, "of a newer version", "no"), 0)
    bench.flush()
    assert bench.streams.open_requests == 0


def test_ids_that_overlap_or_are_none_are_not_opened(bench: Bench) -> None:
    bench.open(FIRST + 1)
    for seq_id, n in ((FIRST, 2), (2**64 - 1, 2), (-1, 1), (FIRST, 0)):
        assert bench.streams.open(Submit(seq_id, PromptKind.TEXT, Sampling(10), n=n), bench.box) is None
    assert bench.streams.open_requests == 1
    assert bench.streams.counts.unknown_results == 4


def ids(bench: Bench) -> dict[int, tuple[int, list[int]]]:
    """Token ids sent with the last `flush`."""
    (batch,) = bench.to_api
    return {seq_id: (first, unpack_i32(tokens).tolist()) for seq_id, (first, tokens) in batch.ids.items()}


def test_token_ids_come_with_their_rows(bench: Bench) -> None:
    bench.admit(options=Options(token_ids=True), stop=("xyz",))
    bench.speak("ab")
    bench.flush()
    assert bench.to_api[0].formats == [TextFormat(FIRST, prompt_tokens=2, prompt=pack_i32(list(b"hi")))]
    assert ids(bench) == {FIRST: (0, [97, 98])}
    bench.speak("xyz", start=2)
    rows, ends = bench.flush()
    assert rows == [(FIRST, 2, 3, "")] and ids(bench) == {FIRST: (2, [120, 121, 122])} and ends[0].output_tokens == 5


def test_a_moved_choice_sends_only_the_ids_that_are_missing(bench: Bench) -> None:
    moved(bench, 3, 3, options=Options(token_ids=True))
    bench.take(*[(FIRST, place, token) for place, token in enumerate(b"abcde")])
    bench.flush()
    assert ids(bench) == {FIRST: (3, [100, 101])}


def test_a_chat_is_told_how_it_is_written_before_its_text(bench: Bench) -> None:
    bench.streams.speak(Formats(Dialects(TOOLS["hermes"], REASONING["think"]), WORDS))
    bench.admit(prompt=b"hi<think>\n", parts=3)
    bench.speak("so</think>a")
    bench.take(finished=[Finished(FIRST, FinishReason.EOS)])
    _, ends = bench.flush()
    assert bench.to_api[0].formats == [TextFormat(FIRST, "hermes", "think", True, 10)]
    assert ends[0].reasoning_tokens == len("so</think>") and ends[0].output_tokens == 11


def test_tools_of_a_model_without_calls_are_refused(bench: Bench) -> None:
    request = bench.open(parts=3)
    with pytest.raises(Reject, match="tool"):
        bench.streams.admit(request, Prompt(array("i", [1])), MODEL)
    assert bench.to_scheduler == []


def test_a_prompt_keeps_its_last_tokens(bench: Bench) -> None:
    bench.admit(prompt=b"abcdef", options=Options(keep_tokens=2))
    assert bench.to_scheduler[0].tokens == pack_i32(list(b"ef"))


def test_a_pattern_that_comes_again_and_again_ends_the_sequence(bench: Bench) -> None:
    bench.admit(options=Options(repetition=Repetition(3, 1, 3)), stop=("xyz",))
    bench.speak("no abxyabxyabxy")
    rows, ends = bench.flush()
    assert not ends, "a pattern of four"
    bench.speak("ababab", start=15)
    assert bench.to_scheduler[-1] == Stop(FIRST)
    more, (end,) = bench.flush()
    assert "".join(row[3] for row in rows + more) == "no abxyabxyabxyababab", "what was held back, too"
    assert (end.reason, end.output_tokens) == (FinishReason.REPETITION, 21)
    assert not bench.streams.open_requests


def test_a_repetition_waits_for_min_tokens_and_gives_way_to_other_ends(bench: Bench) -> None:
    options = Options(repetition=Repetition(1, 1, 2))
    bench.admit(sampling=Sampling(10, min_tokens=4), options=options, stop=("ddd",))
    bench.speak("aab")
    bench.take((FIRST, 3, ord("d")), (FIRST, 4, ord("d")), finished=[Finished(FIRST, FinishReason.LENGTH)])
    assert bench.flush()[1][0].reason is FinishReason.LENGTH, "the last token was the last one anyway"
    bench.admit(FIRST + 1, options=options)
    rows = [(FIRST + 1, place, ord("a")) for place in range(3)]
    bench.take(*rows, finished=[Finished(FIRST + 1, FinishReason.LENGTH)])
    ((_, _, count, text),), (end,) = bench.flush()
    assert (count, text, end.reason) == (2, "aa", FinishReason.REPETITION), "what came with it is dropped"


def test_a_stop_string_tells_what_was_cached(bench: Bench) -> None:
    bench.admit(stop=("b",))
    columns = pack_u64([FIRST]), pack_i32([0]), pack_i32([ord("a")])
    bench.streams.take(TokenBatch(*columns, [], cached={FIRST: 2}), 0)
    bench.speak("b", start=1)
    (end,) = bench.flush()[1]
    assert (end.reason, end.cached_tokens) == (FinishReason.STOP_STRING, 2)
    assert bench.streams.counts.cached_tokens == 2


def thinks(bench: Bench, bound: int, **fields: Any) -> Request:
    """A request whose prompt has begun the reasoning."""
    request = bench.open(**fields)
    thinking = Thinking(bound, tuple(b"</think>"), THINK, True)
    bench.streams.admit(request, Prompt(array("i", list(b"hi")), thinking=thinking), MODEL)
    return request


def test_reasoning_is_ended_at_its_bound_and_the_answer_goes_on(bench: Bench) -> None:
    thinks(bench, 3, sampling=Sampling(40, seed=7))
    assert bench.to_scheduler[-1].sampling == Sampling(3, seed=7)
    bench.speak("ab")
    bench.take((FIRST, 2, ord("c")), finished=[Finished(FIRST, FinishReason.LENGTH, cached_tokens=1)])
    output = pack_i32(list(b"abc</think>"))
    assert bench.to_scheduler[-1] == Admit(
        FIRST, pack_i32(list(b"hi")), Sampling(40, seed=7), output=output, again=True
    )
    bench.streams.lanes.renewed(0)
    assert bench.to_scheduler[-1] == bench.to_scheduler[-2], "another scheduler gets the same"
    bench.speak("d", start=11)
    bench.take((FIRST, 12, EOS), finished=[Finished(FIRST, FinishReason.EOS, EOS, cached_tokens=9)])
    rows, (end,) = bench.flush()
    assert "".join(row[3] for row in rows) == "abc</think>d"
    assert (end.output_tokens, end.cached_tokens) == (13, 1), "what was cached when it began"


def test_reasoning_that_has_ended_goes_on_as_it_is(bench: Bench) -> None:
    thinks(bench, 10, sampling=Sampling(40))
    text = b"a</think>b"
    rows = [(FIRST, place, token) for place, token in enumerate(text)]
    bench.take(*rows, finished=[Finished(FIRST, FinishReason.LENGTH)])
    assert bench.to_scheduler[-1].output == pack_i32(list(text)) and bench.to_scheduler[-1].sampling.max_tokens == 40
    bench.take(finished=[Finished(FIRST, FinishReason.LENGTH)])
    assert bench.flush()[1][0].reason is FinishReason.LENGTH, "a scheduler whose limit is less ends it"


def test_the_end_of_reasoning_counts_and_can_be_the_last(bench: Bench) -> None:
    thinks(bench, 2, sampling=Sampling(5))
    bench.take(*((FIRST, place, ord("a")) for place in (0, 1)), finished=[Finished(FIRST, FinishReason.LENGTH)])
    rows, (end,) = bench.flush()
    assert "".join(row[3] for row in rows) == "aa</t" and (end.reason, end.output_tokens) == (FinishReason.LENGTH, 5)
    assert not isinstance(bench.to_scheduler[-1], Admit) or not bench.to_scheduler[-1].output


def test_a_stop_string_in_the_end_of_reasoning(bench: Bench) -> None:
    thinks(bench, 2, sampling=Sampling(50), stop=("</th",))
    bench.take(*((FIRST, place, ord("a")) for place in (0, 1)), finished=[Finished(FIRST, FinishReason.LENGTH)])
    rows, (end,) = bench.flush()
    assert "".join(row[3] for row in rows) == "aa" and end.reason is FinishReason.STOP_STRING
    assert not bench.streams.open_requests


def test_tokens_that_were_written_have_records(bench: Bench) -> None:
    thinks(bench, 1, sampling=Sampling(50, report=Report(1)))
    columns = pack_u64([FIRST]), pack_i32([0]), pack_i32([ord("a")])
    records = {FIRST: TokenLogprobs(0, record(ord("a"), 1))}
    bench.streams.take(TokenBatch(*columns, [Finished(FIRST, FinishReason.LENGTH)], logprobs=records), 0)
    assert len(bench.to_scheduler[-1].logprobs) == 9 * record_bytes(1)
    bench.flush()
    reported = Reported(Report(1))
    assert reported.add(bench.to_api[-1].logprobs[FIRST])
    assert [(each.own.token, each.own.logprob, len(each.best)) for each in reported.output[:3]] == [
        (ord("a"), -0.5, 1),
        (ord("<"), 0.0, 0),
        (ord("/"), 0.0, 0),
    ]
