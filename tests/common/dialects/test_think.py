from tests.common.dialects.reading import read


def test_before_the_answer_only() -> None:
    assert read("<think>\na\n b \n</think>\n\nc <think>d</think>\n", "", "think") == (
        "c <think>d</think>\n",
        [],
        "a\n b",
    )
    assert read("x<think>a</think>", "", "think") == ("x<think>a</think>", [], "")
    assert read(" \n", "", "think") == (" \n", [], "")


def test_begun_by_the_prompt() -> None:
    assert read("a</think>b", "", "think", opened=True) == ("b", [], "a")
    assert read("<think>a</think>b", "", "think", opened=True) == ("b", [], "a")  # written twice
    assert read("never ended", "", "think", opened=True) == ("", [], "never ended")
    assert read("</think>b", "", "think", opened=True) == ("b", [], "")


def test_other_words_for_it() -> None:
    assert read("◁think▷a◁/think▷b", "", "kimi_vl") == ("b", [], "a")
    assert read("[THINK]a[/THINK]b", "", "mistral") == ("b", [], "a")
