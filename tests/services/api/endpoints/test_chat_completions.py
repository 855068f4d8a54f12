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


def test_many_conversations_in_one_request() -> None:
    async def main() -> None:
        async with running("api.max_choices=4") as (system, client):
            path, talks = "/v1/chat/completions/batch", [CHAT["messages"], [{"role": "user", "content": "ho"}]]
            reply = (await client.post(path, json={"messages": talks, "n": 2, "max_tokens": 1})).json()
            assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
            assert [b"hi" in submit.messages for submit in system.tokenizers[0].submits] == [True, False]
            assert reply["usage"]["prompt_tokens"] == 14 and reply["object"] == "chat.completion"
            for body, param in (
                ({"messages": talks, "n": 3}, "n"),
                ({"messages": []}, "messages"),
                ({"messages": [CHAT["messages"], []]}, "messages[1]"),
                ({"messages": CHAT["messages"]}, "messages[0]"),
            ):
                wrong = await client.post(path, json=body)
                assert wrong.status_code == 400 and wrong.json()["error"]["param"] == param, wrong.text

    scenario(main)
