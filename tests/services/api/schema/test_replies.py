from common.protocol import FinishReason, TextFinished
from services.api.hub import Choice, Request
from services.api.schema.replies import stop_reason, usage_of
from tests.services.api.system import SUBMIT


def test_a_prompt_counts_once_for_all_its_choices() -> None:
    request = Request(0.0, 0)
    for seq_id, first in ((10, 10), (11, 10), (12, 12), (13, 12)):
        choice = Choice(request, seq_id, first, 1, SUBMIT)
        choice.finished = TextFinished(seq_id, FinishReason.EOS, 100, 5, 32)
        request.choices.append(choice)
    request.choices[3].finished = None
    usage = usage_of(request)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (200, 15, 215)
    assert usage.prompt_tokens_details.cached_tokens == 64


def test_stop_reason() -> None:
    def of(reason: FinishReason) -> int | str | None:
        return stop_reason(TextFinished(1, reason, 1, 1, 0, 42, "END"))

    assert of(FinishReason.STOP_STRING) == "END" and of(FinishReason.STOP_TOKEN) == 42
    assert of(FinishReason.EOS) is of(FinishReason.LENGTH) is of(FinishReason.ERROR) is None
