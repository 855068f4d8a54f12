import json
from datetime import datetime
from typing import Any

import pytest

from common import gguf_tokenizer
from common.errors import Reject, RejectReason
from services.tokenizer.chat import ChatTemplate

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "?"}]


def render(source: str, messages: Any = TALK, kwargs: Any = None, prompt: bool = True, max_chars: int = 10_000) -> str:
    encoded = json.dumps(kwargs).encode() if kwargs is not None else b""
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(json.dumps(messages).encode(), encoded, prompt, max_chars)


def refusal(*arguments: Any, **named: Any) -> Reject:
    with pytest.raises(Reject) as caught:
        render(*arguments, **named)
    return caught.value


def test_bundled_template(smollm_metadata: dict[str, Any]) -> None:
    template = ChatTemplate(smollm_metadata["tokenizer.chat_template"], gguf_tokenizer.special_tokens(smollm_metadata))
    text = template.render(json.dumps(TALK).encode(), b"", True, 10_000)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert template.render(json.dumps(own).encode(), b"", False, 10_000) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_blocks_are_trimmed_and_special_tokens_are_known() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\n{{ eos_token }}"
    assert render(source) == "<s>\nuser\nassistant\nuser\n</s>"


def test_loop_controls_and_generation_blocks() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}|{% endgeneration %}{% endfor %}"
    )
    assert render(source) == "Hi|Hello|"


def test_json_is_not_escaped() -> None:
    assert render("{{ tools | tojson }}", kwargs={"tools": ["<é&'>"]}) == '["<é&\'>"]'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": 2\n}'


def test_today() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_arguments_reach_the_template_and_may_change_the_prompt() -> None:
    assert render("{{ thinking }} {{ add_generation_prompt }}", kwargs={"thinking": False}) == "False True"
    assert render("{{ add_generation_prompt }}", kwargs={"add_generation_prompt": False}) == "False"
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"


def test_tool_requests_use_the_tool_template() -> None:
    template = ChatTemplate("plain", {}, "with tools")
    assert template.render(b"[]", b'{"tools": [1]}', True, 100) == "with tools"
    assert template.render(b"[]", b'{"tools": []}', True, 100) == "plain"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    fault = refusal("{{ messages }}", [{"role": "user", "content": image}])
    assert fault.reason == RejectReason.INVALID and '"text"' in fault.message and fault.param == "messages"


def test_missing_content_is_empty() -> None:
    messages = [{"role": "assistant", "content": None}, {"role": "assistant"}]
    assert render("{% for m in messages %}[{{ m.content }}]{% endfor %}", messages) == "[][]"


def test_tool_arguments_become_objects() -> None:
    def call(arguments: Any) -> list[dict[str, Any]]:
        return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]

    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(source, call('{"x": 1}')) == '{"x": 1}'
    assert render(source, call({"x": 1})) == '{"x": 1}'
    assert render(source, call("no json")) == '"no json"'
    assert render("{{ messages[0].tool_calls }}", [{"role": "assistant", "tool_calls": ["odd"]}]) == "['odd']"


def test_template_refuses_with_its_own_words() -> None:
    fault = refusal("{{ raise_exception('roles must alternate') }}")
    assert fault.reason == RejectReason.INVALID and "roles must alternate" in fault.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content.x }}",
        "{{ messages + 1 }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'x'.nothing() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_faults_of_templates_are_refusals(source: str) -> None:
    fault = refusal(source)
    assert fault.reason == RejectReason.INVALID and fault.param == "messages"


def test_template_that_does_not_compile() -> None:
    with pytest.raises(Reject, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})


def test_length_is_bounded_while_rendering() -> None:
    fault = refusal("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", max_chars=1000)
    assert fault.reason == RejectReason.TOO_LONG and "1000 characters" in fault.message


@pytest.mark.parametrize("messages", [b"{", b'"text"', b"[1]", b'[{"role": "\\ud800"}]', b"[" * 100_000])
def test_messages_that_are_no_list_of_objects(messages: bytes) -> None:
    with pytest.raises(Reject, match="list of objects"):
        ChatTemplate("{{ messages }}", {}).render(messages, b"", True, 100)


@pytest.mark.parametrize("kwargs", [[1], {"messages": []}])
def test_template_arguments_are_checked(kwargs: Any) -> None:
    assert refusal("x", kwargs=kwargs).param == "chat_template_kwargs"


def test_a_template_whose_code_does_not_compile() -> None:
    with pytest.raises(Reject, match="cannot be compiled"):
        ChatTemplate("{% break %}", {})


@pytest.mark.parametrize(
    "printed",
    [
        "{{ arguments }}",
        "{{ '' + arguments }}",
        "{{ arguments + '' }}",
        "{{ '' ~ arguments }}",
        "{{ arguments | string }}",
    ],
)
def test_arguments_print_as_the_text_that_they_were(printed: str) -> None:
    """Templates of DeepSeek join them to other text, others ask for their items or make JSON of them."""
    written = '{"b":  1, "a": "é"}'
    call = {"type": "function", "function": {"name": "f", "arguments": written}}
    messages = json.dumps([{"role": "assistant", "tool_calls": [call]}]).encode()
    head = "{% set arguments = messages[0].tool_calls[0].function.arguments %}"
    assert ChatTemplate(head + printed, {}).render(messages, b"", True, 100) == written
    items = "{% for key in arguments.keys() %}{{ key }}{% endfor %}{{ arguments is mapping }}{{ arguments | tojson }}"
    assert ChatTemplate(head + items, {}).render(messages, b"", True, 100) == 'baTrue{"b": 1, "a": "é"}'
