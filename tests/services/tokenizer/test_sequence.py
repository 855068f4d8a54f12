from common.protocol import PromptKind, Sampling, Submit
from common.vocabulary import Vocabulary
from services.tokenizer.outbox import Outbox
from services.tokenizer.sequence import Request, Sequence

WORDS = Vocabulary([b"a", b"</s>", b" b"], special=[1], lead_spaces=1)


def sequence(**fields: object) -> Sequence:
    submit = Submit(10, PromptKind.TEXT, Sampling(4), n=2, **fields)  # type: ignore[arg-type]
    return Sequence(10, Request(submit, Outbox(1, 0.0)), WORDS)


def test_a_request_owns_consecutive_ids() -> None:
    request = sequence().request
    assert list(request.choices()) == [10, 11] and request.live == 2 and not request.admitted


def test_fast_table_depends_on_the_request() -> None:
    assert sequence().fast is WORDS.texts_without_special
    assert sequence(skip_special_tokens=False).fast is WORDS.texts
    assert sequence(stop=("",)).fast is WORDS.texts_without_special
    stopping = sequence(stop=("x",))
    assert stopping.fast is WORDS.no_texts and stopping.matcher is not None


def test_start_of_a_text_asks_for_every_token() -> None:
    first = sequence()
    first.start(WORDS, at_start=True)
    assert first.fast is WORDS.no_texts
    assert first.detokenizer.feed(2) == "b"


def test_rows_of_one_turn_are_one_row() -> None:
    one = sequence()
    one.add_row(0, 1, "a")
    one.add_row(1, 2, "b")
    assert one.box.texts == ["ab"] and list(one.box.counts) == [3] and list(one.box.first_index) == [0]
    one.box.flush(lambda incarnation, message: True)
    one.add_row(3, 1, "c")
    assert one.box.texts == ["c"] and list(one.box.first_index) == [3]
