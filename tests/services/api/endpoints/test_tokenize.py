import json
from typing import Any

import pytest

from common.errors import Reject
from common.protocol import PromptKind
from services.api.endpoints.tokenize import TOKENIZE, question
from tests.services.api.system import CHAT, FACTS, running, scenario


def test_text_to_ids_and_back() -> None:
    async def main() -> None:
        async with running() as (_, client):
            reply = (await client.post("/tokenize", json={"prompt": "abc"})).json()
            assert reply == {"count": 3, "max_model_len": 128, "tokens": [97, 98, 99], "token_strs": None}
            strings = (await client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
            assert strings["token_strs"] == ["a", "b"]
            back = await client.post("/detokenize", json={"tokens": [97, 98]})
            assert back.json() == {"prompt": "ab"}

    scenario(main)


@pytest.mark.parametrize(
    ("tokens", "param"),
    [([1000], "tokens"), ([-1], "tokens[0]"), (["a"], "tokens[0]"), (None, "tokens"), ("ab", "tokens")],
)
def test_ids_that_are_refused(tokens: Any, param: str) -> None:
    async def main() -> None:
        async with running() as (_, client):
            response = await client.post("/detokenize", json={"tokens": tokens})
            assert response.status_code == 400 and response.json()["error"]["param"] == param

    scenario(main)


def asked(**fields: Any) -> Any:
    return question(TOKENIZE.parse(json.dumps(fields).encode()), FACTS)


def test_the_two_shapes() -> None:
    prompt = asked(prompt="x", add_special_tokens=False)
    assert (prompt.kind, prompt.text, prompt.add_special_tokens) == (PromptKind.TEXT, "x", False)
    assert asked(prompt="x").add_special_tokens
    chat = asked(messages=CHAT["messages"])
    assert chat.kind is PromptKind.CHAT and chat.add_generation_prompt and not chat.add_special_tokens
    assert not asked(messages=CHAT["messages"], add_generation_prompt=False).add_generation_prompt


def test_what_a_template_gets_besides() -> None:
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Sure,"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    more = {"tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
    call = asked(messages=talk, continue_final_message=True, **more)
    assert call.goes_on and not call.add_generation_prompt
    kwargs = json.loads(call.template_kwargs)
    assert kwargs["tools"][0]["function"]["name"] == "f" and kwargs["enable_thinking"] is False
    with pytest.raises(Reject, match="must be an assistant"):
        asked(messages=talk[:1], continue_final_message=True)
    with pytest.raises(Reject, match="exclude"):
        asked(messages=talk, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    "fields", [{}, {"prompt": "x", "messages": []}, {"prompt": 5}, {"messages": []}, {"prompt": "x", "model": "y"}]
)
def test_shapes_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Reject):
        asked(**fields)
