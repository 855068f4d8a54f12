import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.dialects.events import CallBegun
from common.dialects.registry import REASONING, TOOLS, Dialects, Reader, choose
from common.errors import ConfigError
from tests.common.dialects.reading import EXAMPLES, PARIS, SILENT, events_of, objects, read, reader_of, said

HARMONY = "<|channel|>analysis<|message|>Hmm, <b>?<|end|><|start|>assistant"
THOUGHT = {"think": "<think>\nHmm, <b>?\n</think>\n\n", "mistral": "[THINK]Hmm, <b>?[/THINK]"}


def test_every_dialect_has_an_example() -> None:
    assert EXAMPLES.keys() == TOOLS.keys()


@pytest.mark.parametrize("name", TOOLS)
def test_published_examples(name: str) -> None:
    answer = read(EXAMPLES[name], name)
    assert objects(answer) == [("get_weather", PARIS), ("time.now", {})]
    assert answer.content == ("" if name in SILENT else "Let me see.")


@pytest.mark.parametrize("name", TOOLS)
def test_without_tools_calls_are_text(name: str) -> None:
    answer = read(EXAMPLES[name], name, asked=None)
    assert not answer.calls
    assert "get_weather" in answer.content or name == "harmony"
    if name != "harmony":  # its channels are always read
        assert answer.content == EXAMPLES[name]


@pytest.mark.parametrize("name", TOOLS)
def test_a_call_that_is_cut_off_is_no_loss(name: str) -> None:
    """At each place: the name and what came of the arguments, or before that the text as it is."""
    text = EXAMPLES[name]
    for cut in range(len(text)):
        answer = read(text[:cut], name)
        assert len(answer.calls) <= 2
        if not answer.calls and name != "harmony":
            assert answer.content == text[:cut]
        for (call, arguments), whole in zip(answer.calls, (PARIS, {}), strict=False):
            assert call in ("get_weather", "time.now")
            pairs = zip(arguments, json.dumps(whole, ensure_ascii=False), strict=False)
            shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            rest = arguments[shared:].removeprefix('"')  # of a marker that is cut, or a literal of Python's
            assert text[:cut].endswith((rest, rest.replace("\\n", "\n")))


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, str, str, list[int]]:
    """A dialect, one of its texts with pieces of it moved, doubled or left out, and where it is cut."""
    name = draw(st.sampled_from(sorted(TOOLS)))
    thinking = draw(st.sampled_from(["", "think", "mistral"]))
    text = draw(st.sampled_from(["", THOUGHT.get(thinking, "")])) + EXAMPLES[name]
    for _ in range(draw(st.integers(0, 3))):
        begin, end = sorted(draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2)))
        to = draw(st.integers(0, len(text)))
        text = draw(st.sampled_from([text[:begin] + text[end:], text[:to] + text[begin:end] + text[to:], text[:end]]))
    return name, thinking, text, draw(st.lists(st.integers(0, len(text)), max_size=12))


@settings(max_examples=250, deadline=None)
@given(answers(), st.booleans())
@example(("hermes", "", '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [20, 35]), False)
@example(("glm", "", "<tool_call>a b</tool_call>", [12]), False)
@example(("harmony", "", "<|channel|>final<|message|>a<|channel|>b", [5]), False)
def test_how_a_text_is_cut_makes_no_difference(answer: tuple[str, str, str, list[int]], opened: bool) -> None:
    name, thinking, text, cuts = answer
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    whole = events_of(reader_of(name, thinking, opened), [text])
    assert events_of(reader_of(name, thinking, opened), pieces) == whole
    assert events_of(reader_of(name, thinking, opened), list(text)) == whole


@pytest.mark.parametrize("name", TOOLS)
def test_long_texts(name: str) -> None:
    """Any part of an answer may be longer than a head is held: nobody fails, and cuts still mean nothing."""
    reasoning = "harmony" if name == "harmony" else "think"
    text = THOUGHT["think"] + EXAMPLES[name] if name != "harmony" else HARMONY + EXAMPLES[name]
    for begin in range(0, len(text), 17):
        part = text[begin : begin + 7]
        long = text[:begin] + part * (20_000 // len(part)) + text[begin:]
        whole = events_of(reader_of(name, reasoning), [long])
        assert events_of(reader_of(name, reasoning), [long[at : at + 900] for at in range(0, len(long), 900)]) == whole


@settings(max_examples=120, deadline=None)
@given(answers())
def test_what_is_no_call_is_all_there(answer: tuple[str, str, str, list[int]]) -> None:
    name, _, text, _ = answer
    events = events_of(reader_of(name), [text])
    if name != "harmony" and not any(isinstance(event, CallBegun) for event in events):
        assert said(events).content == text


@pytest.mark.parametrize("name", [name for name in TOOLS if name != "harmony"])
def test_reasoning_comes_before_calls(name: str) -> None:
    answer = read(THOUGHT["think"] + EXAMPLES[name], name, "think")
    assert answer.reasoning == "Hmm, <b>?" and len(answer.calls) == 2


def test_arguments_come_piece_by_piece() -> None:
    for name in TOOLS:
        reader = reader_of(name)
        events = [event for letter in EXAMPLES[name] for event in reader.feed(letter)]
        longest = max(len(event.text) for event in events if not isinstance(event, CallBegun))
        assert longest < (len("'Paris, «la»\\nville {1}'") + 15 if name == "pythonic" else 18), name


def test_a_head_that_never_ends_is_not_held_for_ever() -> None:
    reader = reader_of("hermes")
    text = '<tool_call>{"x": "' + "y" * 40_000
    shown = "".join(
        event.text for start in range(0, len(text), 100) for event in reader.feed(text[start : start + 100])
    )
    assert shown == text
    assert read(text, "hermes").content == text


TEMPLATES = {
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "deepseek_v3": "<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n```json\\n'",
    "deepseek_v31": "<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "minimax": "<minimax:tool_call>",
    "glm": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "hermes": '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "mistral": "[TOOL_CALLS]",
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "llama_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_tells_the_dialect(name: str) -> None:
    found = choose("auto", "auto", [TEMPLATES[name]], "")
    assert found.tools is TOOLS[name]


def test_the_configuration_of_the_model_tells_it_too() -> None:
    assert choose("auto", "auto", [TEMPLATES["qwen3_coder"]], "mimo_v2_flash").tools is TOOLS["mimo"]
    assert choose("auto", "auto", [], "deepseek_v32").tools is TOOLS["deepseek_v32"]
    assert choose("auto", "auto", ["{{ messages }}"], "llama") == Dialects(None, None)


def test_settings_have_the_last_word() -> None:
    template = [TEMPLATES["hermes"] + "<think>"]
    assert choose("auto", "auto", template, "") == Dialects(TOOLS["hermes"], REASONING["think"])
    assert choose("none", "none", template, "") == Dialects(None, None)
    assert choose("glm", "mistral", template, "") == Dialects(TOOLS["glm"], REASONING["mistral"])
    with pytest.raises(ConfigError, match=r"model\.tool_parser.*hermes"):
        choose("herms", "auto", template, "")
    with pytest.raises(ConfigError, match=r"model\.reasoning_parser.*think"):
        choose("auto", "thin", template, "")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n' }}", "think"),
        ("content.split('</think>')[-1]", "think"),
        ("<think></think><|tool_calls_section_begin|>", "kimi_k2"),
        ("◁think▷", "kimi_vl"),
        ("[THINK]", "mistral"),
        (TEMPLATES["harmony"], "harmony"),
    ],
)
def test_the_template_tells_the_reasoning(template: str, name: str) -> None:
    assert choose("auto", "auto", [template], "").reasoning is REASONING[name]


def test_markers_are_those_of_both() -> None:
    markers = Dialects(TOOLS["mistral"], REASONING["think"]).markers
    assert {"[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"} <= markers and "" not in markers
    assert Dialects(None, None).markers == frozenset()
    assert "tool calls: mistral, reasoning: none" in Dialects(TOOLS["mistral"], None).named


def test_reading_again_gives_the_same_state() -> None:
    """What another process would do that goes on with a text: the rest is read alike."""
    text = EXAMPLES["hermes"]
    for cut in range(0, len(text), 7):
        first, second = reader_of("hermes"), reader_of("hermes")
        for letter in text[:cut]:
            first.feed(letter)
        second.feed(text[:cut])
        assert first.feed(text[cut:]) + first.finish() == second.feed(text[cut:]) + second.finish()


def test_spans_of_reasoning() -> None:
    reader = Reader(Dialects(None, REASONING["think"]), None)
    reader.feed(" <think>a\n</think>\n\nb")
    assert reader.reasoning_spans == [(0, 18)]
    open_ended = Reader(Dialects(None, REASONING["think"]), None, opened=True)
    open_ended.feed("abc")
    assert open_ended.reasoning_spans == [(0, 3)]
