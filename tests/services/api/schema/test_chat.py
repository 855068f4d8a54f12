import json
from typing import Any

import pytest

from common.errors import Reject
from common.protocol import ModelFacts, PromptKind, Submit
from services.api.schema.chat import BODY, submits_of

FACTS = ModelFacts("tiny", "llama", 1000, 128, (2,), 16, 64)
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def submit(messages: Any, **more: Any) -> Submit:
    (made,) = submits_of(BODY.parse(json.dumps({"messages": messages, **more}).encode()), FACTS, 8)
    return made


def refused(messages: Any, **more: Any) -> str | None:
    with pytest.raises(Reject) as caught:
        submit(messages, **more)
    return caught.value.param


def test_a_conversation() -> None:
    talk = [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "yes"}, USER]
    made = submit(talk)
    assert made.kind is PromptKind.CHAT and json.loads(made.messages) == talk
    assert made.sampling.max_tokens == 0 and made.template_kwargs == b"{}"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_roles(role: str) -> None:
    assert json.loads(submit([{"role": role, "content": "x"}]).messages)[0]["role"] == role


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert json.loads(submit([{"role": "user", "content": parts}]).messages) == [{"role": "user", "content": "a\nb"}]


def test_tool_calls_and_their_answers() -> None:
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    answer = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "1"}
    assert json.loads(submit([*talk, answer]).messages)[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "1", "name": "f", "tool_call_id": "c1"},
    ]


def test_reasoning_has_one_name() -> None:
    made = submit([USER, {"role": "assistant", "content": "x", "reasoning_content": "why"}])
    assert json.loads(made.messages)[1]["reasoning"] == "why"


def test_template_arguments() -> None:
    assert json.loads(submit([USER], chat_template_kwargs={"enable_thinking": False}).template_kwargs) == {
        "enable_thinking": False
    }
    assert refused([USER], chat_template_kwargs=[]) == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{}], "messages[0]"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([USER, {"role": "assistant", "content": None}], "messages[1].content"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], "messages[0].function_call"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_that_are_refused(messages: Any, param: str) -> None:
    assert refused(messages) == param


@pytest.mark.parametrize(
    ("name", "harmless", "asking"),
    [
        ("logprobs", False, True),
        ("top_logprobs", 0, 5),
        ("tools", [], [{"type": "function"}]),
        ("tool_choice", "auto", "required"),
        ("functions", [], [{}]),
        ("function_call", "none", {"name": "f"}),
        ("reasoning_effort", "none", "high"),
        ("modalities", ["text"], ["text", "audio"]),
        ("audio", None, {"voice": "x"}),
        ("continue_final_message", False, True),
        ("add_generation_prompt", True, False),
        ("chat_template", None, "{{ x }}"),
        ("documents", [], [{}]),
        ("parallel_tool_calls", True, None),
    ],
)
def test_unsupported_fields(name: str, harmless: Any, asking: Any) -> None:
    assert submit([USER], **{name: harmless}).n == 1
    if asking is not None:
        assert refused([USER], **{name: asking}) == name
