"""Drafts by models: what is proposed is what the models say, and whatever they say, the output stays what it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config import Speculative
from services.worker.drafting import Drafting, Smaller, choose_drafting
from services.worker.graphs import layouts
from services.worker.kernels.registry import Facts, bind
from services.worker.memory import Shape
from tests.services.worker.called_graphs import capture
from tests.services.worker.mtp_checkpoint import FAMILIES, MtpTiny, make_mtp
from tests.services.worker.test_drafts import OUTPUT, PROMPTS, SAMPLINGS, TOKENS, Planner

BLOCKS = 82


@pytest.fixture(scope="module", params=FAMILIES)
def mtp(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> MtpTiny:
    return make_mtp(tmp_path_factory.mktemp("mtp"), request.param)


def by_mtp(driver_of: Any, tokens: int = TOKENS) -> Any:
    settings = Speculative(method="mtp", tokens=tokens)
    return driver_of.driver(BLOCKS, drafts=choose_drafting(settings, driver_of.decoder, Shape(40, 200, 8), no_model))


def no_model(source: str) -> Smaller:
    raise AssertionError("no draft model is asked for")


def test_the_head_predicts_what_its_formula_says(mtp: MtpTiny) -> None:
    """In chunks, and from drafts on: the first by the model's states, the others by the head's own."""
    driver = by_mtp(mtp.tiny(), tokens=3)
    prompt = [5, 9, 33, 71, 8, 120, 44, 3, 90, 17, 61]
    driver.step([(0, 0, 6, False)], added=[driver.start(0, prompt, range(4))])
    (token,) = driver.step([(0, 6, 5, True)])
    known = [*prompt, token]
    rows = driver.runner.rows
    assert rows.tokens[0, : len(known)].tolist() == known and rows.drafts.drafted[0] == 3
    with torch.inference_mode():
        hidden = mtp.hidden(prompt)
        states, logits = mtp.further(known[1:], hidden)
        for place in range(3):
            draft = int(logits[-1].argmax())
            assert rows.tokens[0, len(known) + place] == draft
            hidden = torch.cat((hidden, states[-1:]))
            drafts = rows.tokens[0, len(known) : len(known) + place + 1].tolist()
            states, logits = mtp.further([*known[1:], *drafts], hidden)


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[MtpTiny, MtpTiny]:
    """One checkpoint with both, each as its formula knows it: they differ in norms and projection."""
    first = make_mtp(tmp_path_factory.mktemp("heads"), "MiMoV2FlashForCausalLM")
    path = first.folder / "model.safetensors"
    tensors = load_file(path)
    second = MtpTiny(first.folder, first.whole, {name: values.flip(-1) for name, values in first.own.items()})
    tensors |= {
        name.replace(".layers.0.", ".layers.1."): values.clone()
        for name, values in tensors.items()
        if name.startswith("model.mtp.")
    }
    names = FAMILIES["MiMoV2FlashForCausalLM"][0]
    tensors |= {names[name].replace(".layers.0.", ".layers.1."): values for name, values in second.own.items()}
    save_file(tensors, path)
    return first, second


def test_each_head_looks_one_token_further(two_heads: tuple[MtpTiny, MtpTiny]) -> None:
    """Of the model's states, with the draft before for its newest token; the last one goes on by its own."""
    first, second = two_heads
    driver = by_mtp(first.tiny(), tokens=3)
    prompt = [5, 9, 33, 71, 8, 120, 44, 3, 90, 17, 61]
    driver.step([(0, 0, 6, False)], added=[driver.start(0, prompt, range(4))])
    (token,) = driver.step([(0, 6, 5, True)])
    known = [*prompt, token]
    rows = driver.runner.rows
    with torch.inference_mode():
        hidden = first.hidden(prompt)
        known.append(int(first.further(known[1:], hidden)[1][-1].argmax()))
        states, logits = second.further(known[2:], hidden)
        known.append(int(logits[-1].argmax()))
        known.append(int(second.further(known[2:], torch.cat((hidden, states[-1:])))[1][-1].argmax()))
    assert rows.tokens[0, : len(known)].tolist() == known and rows.drafts.drafted[0] == 3


@pytest.mark.parametrize("replayed", [False, True])
def test_the_drafts_of_two_heads_change_nothing(
    two_heads: tuple[MtpTiny, MtpTiny], monkeypatch: pytest.MonkeyPatch, replayed: bool
) -> None:
    test_the_heads_drafts_change_nothing(two_heads[0], monkeypatch, replayed)


@pytest.mark.parametrize("replayed", [False, True])
def test_the_heads_drafts_change_nothing(mtp: MtpTiny, monkeypatch: pytest.MonkeyPatch, replayed: bool) -> None:
    tiny = mtp.tiny()
    wanted = tiny.driver(BLOCKS).generate(PROMPTS, OUTPUT, sampling=SAMPLINGS)
    driver = by_mtp(tiny)
    captured = capture(driver, layouts(32, 32, 136, 200), monkeypatch) if replayed else None
    planner = Planner(driver, 7)
    assert planner.run() == wanted
    assert planner.tried > 100
    if captured is not None and captured.calls:
        assert captured.followed and {key.chunk > 0 for key in captured.followed} == {False, True}


def smaller(make_tiny: Callable[[str], Any], name: str) -> Callable[[str], Smaller]:
    return lambda source: Smaller(make_tiny(name).decoder, bind(("torch",), Facts("cpu")), torch.float32)


def by_model(make_tiny: Callable[[str], Any], target: Any, name: str) -> Drafting:
    settings = Speculative(method="draft", tokens=TOKENS, model=name)
    found = choose_drafting(settings, target.decoder, Shape(40, 200, 8), smaller(make_tiny, name))
    assert found is not None and found.block_bytes > 0
    return found


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("chunk", [200, 7])
def test_a_model_that_drafts_for_itself_is_always_right(
    make_tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, chunk: int, replayed: bool
) -> None:
    """Greedy rows: every draft holds, whatever held before it, so its own keys and values are those of the row."""
    target = make_tiny("qwen3")
    wanted = target.driver().generate(PROMPTS, OUTPUT, sampling=SAMPLINGS)
    driver = target.driver(BLOCKS, drafts=by_model(make_tiny, target, "qwen3"))
    captured = capture(driver, layouts(32, 32, 136, 200), monkeypatch) if replayed else None
    planner = Planner(driver, chunk)
    assert planner.run() == wanted
    if captured is not None:
        assert len(captured.calls) // 3 < len(captured.followed) < len(captured.calls), "most steps, and not all"
    assert 0 not in planner.mistakes and 1 in planner.mistakes, "the first row is greedy, the second is not"


def test_another_models_drafts_change_nothing(make_tiny: Callable[[str], Any]) -> None:
    target = make_tiny("qwen3")
    wanted = target.driver().generate(PROMPTS, OUTPUT, sampling=SAMPLINGS)
    driver = target.driver(BLOCKS, drafts=by_model(make_tiny, target, "llama"))
    driver.runner.rows.first.resident = torch.zeros(41, 25, dtype=torch.int32)
    planner = Planner(driver, 7)
    assert planner.run() == wanted
    assert planner.tried > 100
