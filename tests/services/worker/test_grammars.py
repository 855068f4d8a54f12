"""What rows under a grammar may draw: ends, faults, rows that come back; each row by itself."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from common.answer_grammar import Thinking, answer_grammar
from common.columns import pack_i32
from common.config import Model
from common.dialects.registry import REASONING, TOOLS, Dialects
from common.errors import ConfigError
from common.grammar import make_matcher
from common.protocol import Grammar, RowStart, Sampling, StepPlan
from services.worker import grammars as module
from services.worker.grammars import Grammars, open_words
from services.worker.state import Step
from tests.e2e.scripted import folder
from tests.services.worker.spelled import EOS, PIECES, grammars, ids, regex, text_of, words

SIZE = 131
PROMPT = ids("hi")
DEAR = "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"


def start(slot: int, grammar: Grammar | None, output: str = "", **sampling: Any) -> RowStart:
    tokens = pack_i32([*PROMPT, *ids(output)])
    return RowStart(slot, slot, tokens, len(PROMPT), 0, b"", Sampling(99, grammar=grammar, **sampling))


def step_of(slots: list[int], samples: list[bool]) -> Step:
    column = np.array(slots, np.int64)
    return Step(column, column, column, np.array(samples, np.bool_))


def allowed(made: Grammars, slots: list[int], index: int = 0) -> list[set[str]]:
    """Texts of the tokens that each row may draw now; the end is its own name."""
    column = np.array(slots, np.int64)
    masks = made.masks(made.rows(column), np.full(len(slots), index))
    assert masks.faults == {}
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :SIZE]
    return [{"END" if token == EOS else PIECES[token] for token in np.flatnonzero(row)} for row in bits]


def feed(made: Grammars, slot: int, text: str) -> None:
    for token in ids(text):
        made.feed(made.rows(np.array([slot])), np.array([token], np.int32))


@pytest.fixture
def made() -> Grammars:
    return grammars(SIZE)


def test_rows_are_bound_where_they_sample(made: Grammars) -> None:
    made.apply(StepPlan(1, added=[start(0, regex("a")), start(1, None), start(2, regex("b"))]))
    assert made.bound(step_of([2, 1, 0], [True, True, False])).tolist() == [0]
    assert allowed(made, [2, 0]) == [{"b"}, {"a"}]
    made.apply(StepPlan(2, removed=pack_i32([2]), added=[start(2, None)]))
    assert made.bound(step_of([2, 1, 0], [True] * 3)).tolist() == [2]
    made.reset()
    assert made.bound(step_of([2, 1, 0], [True] * 3)).tolist() == []


def test_a_row_follows_its_tokens_alone(made: Grammars) -> None:
    made.apply(StepPlan(1, added=[start(0, regex("abc?d|x")), start(1, regex("abc?d|x"))]))
    assert allowed(made, [0]) == [{"a", "ab", "abc", "x"}]
    feed(made, 0, "ab")
    assert allowed(made, [0, 1]) == [{"c", "d"}, {"a", "ab", "abc", "x"}]
    feed(made, 0, "d")
    assert allowed(made, [0], 3) == [{"END"}]
    made.feed(made.rows(np.array([0])), np.array([EOS], np.int32))
    masks = made.masks(made.rows(np.array([0])), np.array([4]))
    assert (masks.bits == -1).all() and not masks.faults, "one step more than it needs means nothing"


def test_a_row_that_comes_back_goes_on(made: Grammars) -> None:
    made.apply(StepPlan(1, added=[start(0, regex("[a-c]{3}z"), "abc"), start(1, regex("[a-c]{3}z"), "ab")]))
    assert allowed(made, [0, 1], 3) == [{"z"}, {"a", "b", "c"}]


def test_ends(made: Grammars) -> None:
    """Stop tokens are ends where one may be; min_tokens and ignore_eos hold as long as anything else may come."""
    stop = (PIECES.index("!"),)
    rows = [
        start(0, regex("a+"), "a", stop_token_ids=stop),
        start(1, regex("a+"), "a", min_tokens=2),
        start(2, regex("a+"), "a", ignore_eos=True, stop_token_ids=stop),
        start(3, regex("a"), "a", min_tokens=9),
        start(4, regex("a"), "a", ignore_eos=True),
        start(5, regex("ab"), "a", stop_token_ids=stop),
    ]
    made.apply(StepPlan(1, added=rows))
    assert allowed(made, [0, 1, 2, 3, 4, 5], 1) == [{"a", "END", "!"}, {"a"}, {"a", "!"}, {"END"}, {"END"}, {"b"}]
    assert allowed(made, [1], 2) == [{"a", "END"}]


def faults(made: Grammars, slots: list[int]) -> dict[int, str]:
    column = np.array(slots, np.int64)
    masks = made.masks(made.rows(column), np.zeros(len(slots), np.int64))
    for place in masks.faults:
        assert (masks.bits[place] == -1).all(), "a faulty row may draw any token, so that the step goes on"
    return masks.faults


def test_a_faulty_row_is_its_own_affair(made: Grammars) -> None:
    made.apply(StepPlan(1, added=[start(0, regex("(")), start(1, regex("a")), start(2, regex("\u20ac"))]))
    found = faults(made, [1, 0, 2])
    assert set(found) == {1, 2}
    assert found[1] == "guided_regex: it cannot go on", "not what the client wrote: it gets into records"
    assert "nothing can come next" in found[2], "this vocabulary has no such character"
    assert faults(made, [0, 1, 2]) == {}, "told once"
    feed(made, 0, "zz")
    assert allowed(made, [1]) == [{"a"}]


def test_a_token_that_does_not_fit_is_a_fault(made: Grammars) -> None:
    made.apply(StepPlan(1, added=[start(0, regex("a")), start(1, regex("abc"), "ax")]))
    feed(made, 0, "b")
    assert set(faults(made, [0, 1])) == {0, 1}


def test_a_step_that_is_too_dear_ends_its_row() -> None:
    """At rank 0; the others would go on, and hear of the end by the next plan."""
    leader, follower = Grammars(SIZE, (EOS,), lambda: words(SIZE)), grammars(SIZE)
    for made in (leader, follower):
        made.apply(StepPlan(1, added=[start(0, regex(DEAR))]))
        made.rows(np.array([0]))[0].making.result(60)
    for _ in range(200):
        found = faults(leader, [0])
        assert faults(follower, [0]) == {}
        if found:
            break
        feed(leader, 0, "a")
        feed(follower, 0, "a")
    assert found[0].startswith("guided_regex: lexer error")


def test_what_is_not_ready_is_to_start_again() -> None:
    go = threading.Event()

    def slow() -> Any:
        go.wait(60)
        return words(SIZE)

    made = Grammars(SIZE, (EOS,), slow)
    made.apply(StepPlan(1, added=[start(0, regex("a"))]))
    assert faults(made, [0]) == {0: ""}
    go.set()
    made.ready()
    made.rows(np.array([0]))[0].making.result(60)
    made.apply(StepPlan(2, removed=pack_i32([0]), added=[start(0, regex("a"))]))
    made.rows(np.array([0]))[0].making.result(60)
    assert allowed(made, [0]) == [{"a"}]


def test_without_a_vocabulary_the_reason_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made = Grammars(SIZE, (EOS,), leads=False)
    made.ready()
    assert "structured output is not available: this worker has no tokenizer" in caplog.text
    made.apply(StepPlan(1, added=[start(0, regex("a"))]))
    assert "has no tokenizer" in faults(made, [0])[0]


def test_another_error_of_the_vocabulary_is_no_secret() -> None:
    def broken() -> Any:
        raise RuntimeError("x")

    with pytest.raises(RuntimeError, match="x"):
        Grammars(SIZE, (EOS,), broken).ready()


def test_few_grammars_are_kept(made: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 40)
    for number in range(8):
        made.apply(StepPlan(1, added=[start(0, regex(f"{number}abcdefghi"))]))
        made.apply(StepPlan(2, removed=pack_i32([0])))
    assert len(made._kept) == 4 and made._kept_bytes == 40
    made.apply(StepPlan(3, added=[start(0, regex("x" * 90))]))
    assert allowed(made, [0]) == [{"x"}] and len(made._kept) == 1, "the one in use stays"


def test_the_bundled_models_words() -> None:
    found = open_words(Model(), 49152 + 40, (2,))
    assert found.vocab_size == 49192 and found.eos_tokens == [2]
    assert found.decode_bytes([6004]) == b"hi" and found.is_special_token(2)
    assert found.tokenize_str('{"name"') and found.is_canonical


def test_markers_that_are_special_tokens_are_text_to_grammars(tmp_path: Path) -> None:
    harmony = TOOLS["harmony"]
    source, mark = folder(tmp_path / "m", "<|channel|> <|message|>", harmony.markers)
    size = mark + 1 + len(harmony.markers)
    found = open_words(Model(source=str(source)), size, (mark,))
    dialects = Dialects(harmony, REASONING["harmony"])
    grammar = answer_grammar(regex("[0-9]+"), None, [], dialects, Thinking.NO)
    assert grammar is not None
    matcher = make_matcher(grammar, found)
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>12"
    tokens = Tokenizer.from_file(str(source / "tokenizer.json")).encode(answer, add_special_tokens=False).ids
    assert len([token for token in tokens if token > mark]) == 6
    assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_a_model_without_tokenizer_or_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError):
        open_words(Model(source=str(tmp_path)), 9, (2,))
    with pytest.raises(ConfigError, match="end-of-sequence"):
        open_words(Model(), 9, ())


def test_texts_of_tokens() -> None:
    assert text_of([*ids("ab"), EOS, 7]) == "ab"
