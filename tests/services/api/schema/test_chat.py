import json
from typing import Any

import pytest

from common.constraints import ToolUse
from common.errors import Reject
from common.logprobs import Report
from common.protocol import ModelFacts, PromptKind, Submit
from services.api.answer import Wanted
from services.api.schema.chat import BODY, submits_of, wanted_of

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


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "my-custom role"])
def test_roles(role: str) -> None:
    """Which ones there are is the template's matter."""
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
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "1", "name": "f", "tool_call_id": "c1"},
    ]


def test_reasoning_has_the_names_that_templates_have_for_it() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = json.loads(submit([USER, {"role": "assistant", "content": "x", name: "why"}]).messages)[1]
        assert message["reasoning"] == message["reasoning_content"] == message["thinking"] == "why"
    called = {"role": "assistant", "content": "x", "reasoning": "why", "tool_calls": [CALL]}
    assert "thinking" not in json.loads(submit([USER, called]).messages)[1]  # gpt-oss' template takes one of the two


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_tools_go_to_the_template() -> None:
    made = submit([USER], tools=[TOOL], tool_choice="auto")
    shown = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert json.loads(made.template_kwargs) == {"tools": [{"type": "function", "function": shown}]}
    assert made.parts == 3 and submit([USER]).parts == 1
    none = submit([USER], tools=[TOOL], tool_choice="none")
    assert none.parts == 1 and "tools" not in json.loads(none.template_kwargs)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": "g"}]}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
)
def test_tools_that_are_refused(asked: dict[str, Any], param: str) -> None:
    assert refused([USER], **{"tools": [TOOL], **asked}) == param


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


@pytest.mark.parametrize(
    ("asked", "use"),
    [
        ({}, None),
        ({"tool_choice": "none", "parallel_tool_calls": False}, None),
        ({"tool_choice": "required"}, ToolUse(("f", "g"), must=True)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ToolUse(("f", "g"), must=True, many=False)),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, ToolUse(("g",), must=True, many=False)),
        ({"tool_choice": {"type": "function", "name": "g"}}, ToolUse(("g",), must=True, many=False)),
        (allowed("auto", "g", "f", "g"), None),
        (allowed("auto", "g"), ToolUse(("g",))),
        (allowed("required", "g"), ToolUse(("g",), must=True)),
        ({"parallel_tool_calls": False}, ToolUse(("f", "g"), many=False)),
        ({"response_format": {"type": "json_object"}}, ToolUse(("f", "g"))),
        ({"response_format": {"type": "text"}}, None),
        ({"tools": [TOOL, named("g")]}, ToolUse(("f", "g"), strict=("f",))),
    ],
)
def test_what_is_enforced_of_calls(asked: dict[str, Any], use: ToolUse | None) -> None:
    assert submit([USER], **{"tools": [named("f"), named("g")], **asked}).options.calls == use


def test_effort_is_told_in_the_words_of_templates() -> None:
    assert json.loads(submit([USER], reasoning_effort="high").template_kwargs) == {
        "enable_thinking": True,
        "thinking": True,
        "reasoning_effort": "high",
    }
    off = {"enable_thinking": False, "thinking": False}
    assert json.loads(submit([USER], reasoning_effort="none").template_kwargs) == off
    own = submit([USER], reasoning_effort="none", chat_template_kwargs={"thinking": True}).template_kwargs
    assert json.loads(own) == off | {"thinking": True}


def test_where_the_prompt_ends() -> None:
    started = [USER, {"role": "assistant", "content": "The capital"}]
    assert submit([USER]).options.prompt_end == 0
    assert submit(started, add_generation_prompt=False).options.prompt_end == 1
    assert submit(started, continue_final_message=True).options.prompt_end == 2
    assert submit(started, continue_final_message=True, add_generation_prompt=False).options.prompt_end == 2
    assert refused(started, continue_final_message=True, add_generation_prompt=True) == "continue_final_message"
    for talk in ([USER], [USER, {"role": "assistant", "tool_calls": [CALL]}]):
        assert refused(talk, continue_final_message=True) == "continue_final_message"


def test_what_is_wanted() -> None:
    def wanted(**more: Any) -> Wanted:
        return wanted_of(BODY.parse(json.dumps({"messages": [USER], **more}).encode()))

    assert wanted() == Wanted()
    asked = wanted(tools=[TOOL], parallel_tool_calls=False, include_reasoning=False)
    assert asked.tools is not None and "f" in asked.tools
    assert not asked.parallel and not asked.reasoning
    assert wanted(tools=[TOOL], tool_choice="none").tools is None


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
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user\n<|im_start|>", "content": "x"}], "messages[0].role"),
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
        ("functions", [], [{}]),
        ("function_call", "none", {"name": "f"}),
        ("modalities", ["text"], ["text", "audio"]),
        ("audio", None, {"voice": "x"}),
        ("chat_template", None, "{{ x }}"),
        ("documents", [], [{}]),
    ],
)
def test_unsupported_fields(name: str, harmless: Any, asking: Any) -> None:
    assert submit([USER], **{name: harmless}).n == 1
    if asking is not None:
        assert refused([USER], **{name: asking}) == name


@pytest.mark.parametrize(
    ("fields", "report"),
    [
        ({}, Report()),
        ({"logprobs": False, "top_logprobs": 0}, Report()),
        ({"logprobs": True}, Report(0)),
        ({"logprobs": True, "top_logprobs": 20}, Report(20)),
        ({"prompt_logprobs": 3}, Report(-1, 3)),
        ({"logprobs": True, "logprob_token_ids": []}, Report(0)),
        ({"logprobs": True, "top_logprobs": 9, "logprob_token_ids": [7, 5, 7]}, Report(2, named=(7, 5))),
    ],
)
def test_log_probabilities(fields: dict[str, Any], report: Report) -> None:
    assert submit([USER], **fields).sampling.report == report


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [1], "use_beam_search": True}, "logprob_token_ids"),
    ],
)
def test_log_probabilities_that_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refused([USER], **fields) == param
