import json
from typing import Any

import pytest

from common.errors import Reject
from services.api.schema.chat import ChatRequest, messages_json
from services.api.schema.conversion import chat_of, renamed
from services.api.schema.responses import BODY, NAMES, InputItem, chat_fields, check, converse, input_items

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}


def chat(given: Any, earlier: tuple[InputItem, ...] = (), **more: Any) -> ChatRequest:
    asked = BODY.parse(json.dumps({"input": given, **more}).encode())
    check(asked)
    talk = converse(asked, earlier, input_items(asked))
    with renamed(NAMES | talk.places):
        made = chat_of(chat_fields(asked, talk))
        messages_json(made.messages)
        return made


def refused(given: Any = "x", **more: Any) -> str | None:
    with pytest.raises(Reject) as caught:
        chat(given, **more)
    assert caught.value.param is None or caught.value.param.split("[")[0].split(".")[0] in caught.value.message
    return caught.value.param


def test_text_and_items_and_what_was_before() -> None:
    made = chat("hi", (InputItem(type="message", role="user", content="before"),), instructions="be brief")
    assert [(m.role, m.content if isinstance(m.content, str) else m.content[0].text) for m in made.messages] == [  # type: ignore[index]
        ("system", "be brief"),
        ("user", "before"),
        ("user", "hi"),
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yes", "annotations": []}],
        },
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
    ]
    made = chat(items)
    assert [message.role for message in made.messages] == ["user", "assistant", "tool"]
    assistant = made.messages[1]
    assert assistant.reasoning_content == "hm" and assistant.tool_calls and assistant.tool_calls[0].id == "c1"


def test_fields() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    made = chat(
        "x",
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        max_output_tokens=5,
        reasoning={"effort": "low", "summary": "auto"},
        truncation="auto",
        temperature=0.5,
        text={"format": {"type": "text"}},
    )
    assert (made.max_completion_tokens, made.reasoning_effort, made.truncate_prompt_tokens) == (5, "low", -1)
    assert made.tools and made.tools[0].function.name == "f" and made.tools[0].function.strict
    assert made.tool_choice == {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input", {"input": None}),
        ("input", {"input": []}),
        ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input[0].type", {"input": [{"type": "computer_call"}]}),
        ("input[1].call_id", {"input": [{"role": "user", "content": "x"}, CALL | {"call_id": None}]}),
        ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("temperature", {"temperature": 3}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[0].name", {"tools": [{"type": "function"}]}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("conversation", {"conversation": "c"}),
        ("background", {"background": True, "stream": True}),
        ("background", {"background": True, "store": False}),
        ("include", {"include": ["file_search_call.results"]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"top_logprobs": -1, "include": ["message.output_text.logprobs"]}),
        ("reasoning.summary", {"reasoning": {"summary": "detailed"}}),
        ("metadata", {"metadata": {"a": "b" * 600}}),
    ],
)
def test_bad_input_is_named(param: str, body: dict[str, Any]) -> None:
    found = refused(body.pop("input", "x"), **body)
    assert found is not None and (found == param or found.startswith(f"{param}[")), found
