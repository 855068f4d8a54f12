import pytest

from common.protocol import FinishReason
from common.recorder import Recorder
from services.scheduler.journal import Journal


@pytest.mark.parametrize(
    ("line", "text", "reason"),
    [
        ("row in step 5, 16 of 40 tokens have KV", "row in step 5, 16 of 40 tokens have KV", 0),
        ("worker lost: step 5 gave token 99, outside the vocabulary", "worker lost", 0),
        ("LENGTH", "LENGTH", FinishReason.LENGTH),
        ("ERROR 40 tokens up to id 77 do not fit the worker", "ERROR", FinishReason.ERROR),
    ],
)
def test_a_line_of_a_story_becomes_an_event_without_details(line: str, text: str, reason: int) -> None:
    recorder = Recorder()
    Journal(recorder).note(7, line)
    assert [(e.seq, e.text, e.code) for e in recorder.read()["requests"]] == [(7, text, reason)]
