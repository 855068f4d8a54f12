"""Log-probabilities through the Streams: with the rows that they belong to, after repeats, losses and takeovers too."""

from array import array

import msgspec
import pytest

from common.columns import pack_i32, pack_u64, unpack_i32
from common.errors import Reject
from common.logprobs import Report, TextLogprobs, TokenLogprobs, record_bytes
from common.protocol import Finished, FinishReason, Sampling, TextBatch, TokenBatch, make_seq_id
from services.tokenizer.reports import MOST_ENTRIES, check_report
from tests.services.tokenizer.test_streams import EOS, FIRST, MODEL, Bench

OLD = make_seq_id(0, 0, 1, 500)


def record(token: int, top: int) -> bytes:
    others = [1000, *range(token + 1, token + top)][:top]  # no token of the vocabulary is the first one
    return pack_i32([1, token, *others]) + array("f", [-0.5] * (1 + top)).tobytes()


class Reporting(Bench):
    def tell(
        self,
        tokens: bytes,
        first: int = 0,
        top: int = 1,
        prompt: tuple[int, bytes] = (0, b""),
        ended: FinishReason | None = None,
        seq_id: int = FIRST,
        short: int = 0,
    ) -> None:
        """One batch: tokens with their records, and records of a prompt's tokens from a place on."""
        records = b"".join(record(token, top) for token in tokens)
        told = TokenLogprobs(
            first, records[: len(records) - short], prompt[0], b"".join(record(t, 0) for t in prompt[1])
        )
        finished = [] if ended is None else [Finished(seq_id, ended, EOS if ended is FinishReason.EOS else -1)]
        columns = pack_u64([seq_id] * len(tokens)), pack_i32(range(first, first + len(tokens))), pack_i32(list(tokens))
        self.streams.take(TokenBatch(*columns, finished, logprobs={seq_id: told}), 0)

    def sent(self) -> list[TextBatch]:
        self.flush()
        return [batch for batch in self.to_api if isinstance(batch, TextBatch)]


def outputs(batches: list[TextBatch], seq_id: int = FIRST) -> tuple[list[tuple[int, int]], bytes, list[int]]:
    """Rows' first and count; the tokens of the records, joined; and their offsets."""
    rows, tokens, offsets = [], b"", []
    for batch in batches:
        told: TextLogprobs | None = batch.logprobs.get(seq_id)
        for row in zip(unpack_i32(batch.first_index), unpack_i32(batch.counts), strict=True):
            rows.append(row)
            assert (told is None) == (row[1] == 0) and (told is None or told.first == row[0])
        if told is not None:
            width, entries = record_bytes(1), 2
            assert len(told.pieces) == entries * len(told.records) // width
            tokens += b"".join(told.pieces[::entries])
            assert set(told.pieces[1::entries]) == {b""}, "an id that the vocabulary does not have"
            offsets += unpack_i32(told.offsets)
    return rows, tokens, offsets


@pytest.fixture
def bench() -> Reporting:
    return Reporting()


def test_they_come_with_their_rows_and_characters_that_are_cut_begin_together(bench: Reporting) -> None:
    bench.admit(sampling=Sampling(20, report=Report(1)))
    text, batches = "aé🙂b".encode(), []
    for place, token in enumerate(text):
        bench.tell(bytes([token]), place)
        if place % 3 == 0:
            batches += bench.sent()
            bench.tell(bytes([token]), place)  # a repeat
    batches += bench.sent()
    assert outputs(batches) == ([(0, 1), (1, 3), (4, 3), (7, 1)], text, [0, 1, 1, 2, 2, 2, 2, 3])
    bench.tell(b"", len(text), ended=FinishReason.LENGTH)
    assert bench.sent()[0].finished[0].output_tokens == 8


def test_offsets_count_the_text_that_is_shown(bench: Reporting) -> None:
    bench.admit(prompt=bytes([]) + b"x", sampling=Sampling(20, report=Report(1)), stop=("cd",))
    bench.tell(b"abc")
    bench.tell(b"de", 3)
    assert outputs(bench.sent()) == ([(0, 4)], b"abcd", [0, 1, 2, 3]), "not trimmed to the text, up to the match"
    bench.admit(sampling=Sampling(20, report=Report(1)))
    bench.tell(b"a\xe2\x80b\xe2")
    assert outputs(bench.sent())[2] == [0, 1, 1, 2, 3], "what is cut has become one character"


def test_the_ending_token_has_one_too(bench: Reporting) -> None:
    bench.admit(sampling=Sampling(20, report=Report(1)))
    columns = pack_u64([FIRST] * 2), pack_i32([0, 1]), pack_i32([ord("a"), EOS])
    told = TokenLogprobs(0, record(ord("a"), 1) + record(EOS, 1))
    ended = Finished(FIRST, FinishReason.EOS, EOS)
    bench.streams.take(TokenBatch(*columns, [ended], logprobs={FIRST: told}), 0)
    (batch,) = bench.sent()
    assert batch.texts == ["a"] and batch.finished[0].output_tokens == 2
    assert batch.logprobs[FIRST].pieces[::2] == [b"a", b"</s>"] and list(unpack_i32(batch.logprobs[FIRST].offsets)) == [
        0,
        1,
    ]


def test_a_prompt_s_go_at_once_and_once(bench: Reporting) -> None:
    bench.admit(prompt=b"hello", sampling=Sampling(20, report=Report(-1, 0)), n=2)
    bench.tell(b"", prompt=(1, b"el"), top=-1)
    bench.tell(b"", prompt=(2, b"ll"), top=-1)
    (batch,) = bench.sent()
    told = batch.prompt_logprobs[FIRST]
    assert (told.first, told.lead, told.pieces) == (1, b"h", [b"e", b"l", b"l"]) and not batch.texts
    assert told.lead_token == ord("h")
    bench.tell(b"", prompt=(4, b"o"), top=-1)
    told = bench.sent()[0].prompt_logprobs[FIRST]
    assert (told.first, told.lead, told.pieces) == (4, b"", [b"o"])
    bench.tell(b"", prompt=(1, b"ello"), top=-1)
    assert not bench.sent()


@pytest.mark.parametrize("fault", ["gap", "none", "cut", "prompt", "unwanted"])
def test_what_is_lost_ends_the_sequence(bench: Reporting, fault: str) -> None:
    bench.admit(prompt=b"hello", sampling=Sampling(20, report=Report(1, 0)))
    bench.tell(b"a")
    if fault == "gap":
        bench.streams.take(TokenBatch(b"", b"", b"", [], logprobs={FIRST: TokenLogprobs(2, record(5, 1))}), 0)
    elif fault == "none":
        bench.take((FIRST, 1, ord("b")))
    elif fault == "cut":
        bench.tell(b"b", 1, short=4)
    elif fault == "prompt":
        bench.tell(b"", 1, prompt=(2, b"l"))
    else:
        bench.admit(OLD)
        bench.tell(b"a", seq_id=OLD)
        assert bench.flush()[0][-1] == (OLD, 0, 1, "a"), "it wants none: they are left out"
        return
    (ended,) = bench.flush()[1]
    assert ended.reason is FinishReason.ERROR and "lost" in ended.message


def test_another_scheduler_gets_what_is_there(bench: Reporting) -> None:
    bench.admit(prompt=b"hello", sampling=Sampling(20, seed=3, report=Report(1, 0)))
    bench.tell(b"", prompt=(1, b"el"))
    bench.streams.lanes.renewed(0)
    assert bench.to_scheduler[-1].sampling.report == Report(1, 0)
    bench.tell(b"ab", prompt=(1, b"ello"))
    bench.streams.lanes.renewed(0)
    again = bench.to_scheduler[-1]
    assert again.sampling.report == Report(1) and again.output == pack_i32(list(b"ab"))
    assert again.logprobs == record(ord("a"), 1) + record(ord("b"), 1)
    assert [len(told.prompt_logprobs[FIRST].pieces) for told in bench.sent()] == [4]


@pytest.mark.parametrize("delivered", range(5))
def test_what_another_tokenizer_has_told_is_not_told_again(bench: Reporting, delivered: int) -> None:
    fields = {"origin": OLD, "delivered_tokens": delivered, "delivered_chars": delivered}
    bench.admit(sampling=Sampling(20, report=Report(1)), **fields)
    bench.tell(b"abc")
    bench.tell(b"de", 3)
    bench.tell(b"", prompt=(1, b"i"))  # the API has had it
    rows, tokens, offsets = outputs(bench.sent())
    assert tokens == b"abcde"[delivered:] and offsets == list(range(delivered, 5)) and rows[0][0] == delivered


def test_an_output_that_nobody_wants_is_silent(bench: Reporting) -> None:
    options = msgspec.structs.replace(bench.open(OLD).submit.options, silent=True)
    bench.admit(prompt=b"hi", sampling=Sampling(1, report=Report(1, 0)), options=options)
    bench.tell(b"x", prompt=(1, b"i"), ended=FinishReason.LENGTH)
    (batch,) = bench.sent()
    assert not batch.texts and not batch.logprobs and batch.finished[0].output_tokens == 0
    assert batch.prompt_logprobs[FIRST].pieces == [b"i"]
    bench.admit(OLD + 1, options=options)
    bench.take((OLD + 1, 0, ord("x")))
    assert bench.flush() == ([], []), "also where nothing else is asked for"


def test_a_prompt_may_be_too_long_for_what_it_asks_for(bench: Reporting) -> None:
    check_report(MOST_ENTRIES // 3, Report(20, 2))
    with pytest.raises(Reject) as refusal:
        check_report(MOST_ENTRIES // 3 + 1, Report(-1, 2))
    assert refusal.value.param == "prompt_logprobs"
    assert MODEL.vocab_size == EOS + 1
