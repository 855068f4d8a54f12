import pytest

from tests.common.dialects.reading import read

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def test_channels() -> None:
    text = f"{ANALYSIS}One.<|end|><|start|>assistant{ANALYSIS}Two.<|end|>{FINAL}Yes.<|return|>"
    assert read(text, "harmony", "harmony") == ("Yes.", [], "One.\nTwo.")
    assert read(text, "", "harmony") == ("Yes.", [], "One.\nTwo.")
    assert read(text, "harmony") == ("One.\nTwo.\nYes.", [], "")


def test_a_recipient_at_either_place() -> None:
    behind = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    before = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
    for text in (behind, before, "<|start|>assistant" + before):
        assert read(text, "harmony", "harmony") == ("", [("f", "{}")], "")
    assert read(behind, "harmony", "harmony", asked=None) == ("{}", [], "")


@pytest.mark.parametrize(
    "text", ["plain words", "<|channel|>final", "<|start|>assistant<|channel|>ana", " to", "a<|start|>b"]
)
def test_what_is_no_message_is_text(text: str) -> None:
    assert read(text, "harmony", "harmony") == (text, [], "")


def test_an_unended_analysis() -> None:
    assert read(ANALYSIS + "Hm", "harmony", "harmony") == ("", [], "Hm")
