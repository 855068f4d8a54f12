from common.protocol import FinishReason, TextFinished
from services.api.endpoints.chat_completions import reply
from services.api.hub import Choice, Request
from tests.services.api.system import CHAT, SUBMIT, running, scenario


def test_a_whole_reply() -> None:
    request = Request(0.0, 0)
    choice = Choice(request, 4, 4, 1, SUBMIT)
    choice.parts = ["Par", "is"]
    choice.finished = TextFinished(4, FinishReason.STOP_TOKEN, 3, 2, 1, 42)
    request.choices.append(choice)
    made = reply("chatcmpl-1", 5, "tiny", request)
    assert (made.id, made.created, made.model, made.object) == ("chatcmpl-1", 5, "tiny", "chat.completion")
    (only,) = made.choices
    assert (only.message.content, only.finish_reason, only.stop_reason) == ("Paris", "stop", 42)
    assert made.usage.total_tokens == 5


def test_the_id_and_the_role() -> None:
    async def main() -> None:
        async with running() as (_, client):
            answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
            assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
            assert answer["choices"][0]["message"]["role"] == "assistant"

    scenario(main)
