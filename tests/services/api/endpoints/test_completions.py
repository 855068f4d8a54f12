from common.protocol import FinishReason, TextFinished
from services.api.endpoints.completions import reply
from services.api.hub import Choice, Request
from tests.services.api.system import COMPLETION, SUBMIT, running, scenario


def test_a_whole_reply() -> None:
    request = Request(0.0, 0)
    for index, text in enumerate(("a", "b")):
        choice = Choice(request, index, 0, 1, SUBMIT)
        request.choices.append(choice)
        choice.parts = [text]
        choice.finished = TextFinished(index, FinishReason.STOP_STRING, 3, 2, 1, stop_string="END")
    made = reply("cmpl-1", 5, "tiny", request)
    assert [(c.index, c.text, c.finish_reason, c.stop_reason) for c in made.choices] == [
        (0, "a", "stop", "END"),
        (1, "b", "stop", "END"),
    ]
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 4)


def test_sixteen_tokens_unless_told_otherwise() -> None:
    async def main() -> None:
        async with running() as (_, client):
            answer = (await client.post("/v1/completions", json=COMPLETION)).json()
            assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
            assert answer["usage"]["completion_tokens"] == 16

    scenario(main)
