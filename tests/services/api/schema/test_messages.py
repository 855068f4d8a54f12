import json
from typing import Any

import pytest

from common.errors import Reject
from services.api.endpoints.messages import names
from services.api.schema.chat import ChatRequest, messages_json
from services.api.schema.conversion import chat_of, renamed
from services.api.schema.messages import BODY, chat_fields, converse

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def chat(messages: Any = (USER,), **more: Any) -> ChatRequest:
    asked = BODY.parse(json.dumps({"messages": messages, "max_tokens": 5, **more}).encode())
    talk = converse(asked)
    with renamed(names(asked) | talk.places):
        made = chat_of(chat_fields(asked, talk))
        messages_json(made.messages)
    return made


def test_a_conversation_with_everything() -> None:
    made = chat(
        [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
                    {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
        system=[{"type": "text", "text": "be brief"}],
    )
    plain = json.loads(messages_json(made.messages))
    assert [(each["role"], each["content"]) for each in plain] == [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "a"),
        ("tool", "42"),
        ("user", "and?"),
    ]
    assert plain[2]["reasoning_content"] == "hm" and plain[3]["tool_call_id"] == "t1"
    assert plain[2]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'


def test_fields() -> None:
    made = chat(
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low"},
        top_k=5,
        metadata={"user_id": "u"},
    )
    assert made.max_tokens == 5 and made.stop == ["END"] and made.top_k == 5 and made.reasoning_effort == "low"
    assert made.tools and made.tools[0].function.parameters == {"type": "object"}
    assert made.parallel_tool_calls is False and made.tool_choice == "auto"
    assert made.chat_template_kwargs == {"enable_thinking": True, "thinking": True} and made.include_reasoning
    assert made.thinking_token_budget == 1024
    off = chat(thinking={"type": "disabled"})
    assert off.chat_template_kwargs == {"enable_thinking": False, "thinking": False} and off.include_reasoning is False
    choices = {
        "any": "required",
        "none": "none",
    }
    for theirs, ours in choices.items():
        assert chat(tool_choice={"type": theirs}).tool_choice == ours


def test_an_assistants_last_words_go_on() -> None:
    assert chat([USER, {"role": "assistant", "content": "The best is ("}]).continue_final_message
    assert chat().continue_final_message is None


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": 0}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        (
            "messages[0].content[0].content[0].type",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
                    }
                ]
            },
        ),
        (
            "messages[1].content[0].input",
            {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}]},
        ),
        ("system[0].type", {"system": [{"type": "image"}]}),
        ("tools[0].type", {"tools": [TOOL | {"type": "web_search_20250305"}]}),
        ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
        ("tools[0].name", {"tools": [TOOL | {"name": "no name"}]}),
        ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
        ("stop_sequences[0]", {"stop_sequences": [""]}),
        ("temperature", {"temperature": -1}),
        ("top_k", {"top_k": -5}),
        ("mcp_servers", {"mcp_servers": [{"type": "url"}]}),
    ],
)
def test_bad_input_is_named(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(Reject) as caught:
        chat(**body)
    found = caught.value.param or ""
    assert found == param or found.startswith(f"{param}["), found
