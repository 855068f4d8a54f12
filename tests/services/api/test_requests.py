import msgspec

from common.protocol import FinishReason, TextFinished, TextFormat
from services.api.answer import Wanted
from tests.common.dialects.reading import ASKED, EXAMPLES
from tests.services.api.system import rows
from tests.services.api.test_answer import open_request, told


def test_all_choices_of_a_prompt_are_read_alike() -> None:
    hub, request = open_request(Wanted(ASKED))
    hub.feed(told(request, "hermes"), 1.0)
    first, second = request.choices
    assert first.answer is not None and second.answer is not None and first.answer is not second.answer


def test_without_a_format_text_is_text() -> None:
    hub, request = open_request(Wanted(ASKED))
    hub.feed(msgspec.structs.replace(rows(), formats=[TextFormat(12345, "hermes")]), 1.0)
    assert request.choices[0].answer is None


def test_a_choice_that_moves_is_read_on() -> None:
    """Another tokenizer tells the same format again: what was read stays."""
    hub, request = open_request(Wanted(ASKED))
    hub.feed(told(request, "hermes"), 1.0)
    choice, text = request.choices[0], EXAMPLES["hermes"]
    hub.feed(rows((choice.seq_id, 0, 1, text[:40])), 1.0)
    before = choice.read()
    hub.feed(told(request, "hermes"), 1.0)
    hub.feed(rows((choice.seq_id, 1, 1, text[40:])), 1.0)
    assert before and len(choice.read()) > 1
    assert choice.answer is not None and choice.answer.calls == 2


def test_words_for_the_end() -> None:
    for reason, word in ((FinishReason.EOS, "tool_calls"), (FinishReason.LENGTH, "length")):
        hub, request = open_request(Wanted(ASKED))
        hub.feed(told(request, "hermes"), 1.0)
        choice = request.choices[0]
        hub.feed(rows((choice.seq_id, 0, 1, EXAMPLES["hermes"])), 1.0)
        hub.feed(rows(finished=(TextFinished(choice.seq_id, reason, 1, 1),)), 1.0)
        assert choice.read()
        assert choice.word == word
