"""Beam search over HTTP with the bundled model in float32: what transformers finds, killed or not."""

from typing import Any

import httpx
import openai
import pytest
import torch

from services.worker.source import open_model
from tests.e2e.steered import LIMIT_S, Steered

MODEL = "SmolLM2-135M-Instruct"
PROMPT = [504, 3575, 282, 4649, 314, 30, 669, 3575, 282, 5869, 314]
ASKED: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10}
SEARCH: dict[str, Any] = {"use_beam_search": True, "length_penalty": 0.6, "return_token_ids": True}


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[float]]:
    """The three best outputs and their scores."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds: only where it runs

    source = open_model("bundled")
    model = LlamaForCausalLM(LlamaConfig(**source.config))
    model.load_state_dict({name: each.dense(torch.float32) for name, each in source.tensors.items()}, strict=False)
    model.tie_weights()
    told = model.eval().generate(
        torch.tensor([PROMPT]),
        num_beams=3,
        num_return_sequences=3,
        length_penalty=0.6,
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=list(source.eos_token_ids),
        pad_token_id=1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return [row[len(PROMPT) :].tolist() for row in told.sequences], told.sequences_scores.tolist()


def test_it_finds_what_transformers_finds(client: openai.OpenAI, expected: tuple[list[list[int]], list[float]]) -> None:
    reply = client.completions.create(**ASKED, n=3, logprobs=1, extra_body=SEARCH)
    for choice, tokens, score in zip(reply.choices, *expected, strict=True):
        ids = choice.token_ids  # type: ignore[attr-defined]
        assert ids == tokens[: len(ids)] and {*tokens[len(ids) :]} <= {1}
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert sum(choice.logprobs.token_logprobs) / len(ids) ** 0.6 == pytest.approx(score, abs=2e-3)
    best = client.completions.create(**ASKED, n=1, best_of=3, extra_body=SEARCH)
    assert [choice.text for choice in best.choices] == [reply.choices[0].text]
    usage = reply.usage
    assert usage is not None and usage.prompt_tokens == len(PROMPT)


def test_a_chat(client: openai.OpenAI) -> None:
    talk: Any = [{"role": "user", "content": "What is the capital of France?"}]
    asked: dict[str, Any] = {"model": MODEL, "messages": talk, "max_tokens": 24, "n": 2, "logprobs": True}
    first, second = client.chat.completions.create(**asked, extra_body={"use_beam_search": True}).choices
    assert "Paris" in (first.message.content or "") and first.message.content != second.message.content
    for choice in (first, second):
        assert choice.logprobs is not None and choice.logprobs.content
        said = b"".join(bytes(each.bytes or ()) for each in choice.logprobs.content).decode()
        assert said.startswith(choice.message.content or "-")
    with pytest.raises(openai.BadRequestError, match="no stream"):
        client.chat.completions.create(**asked, stream=True, extra_body={"use_beam_search": True})
    with pytest.raises(openai.BadRequestError, match="length_penalty needs use_beam_search"):
        client.chat.completions.create(**asked, extra_body={"length_penalty": 2})


def test_lost_services_change_nothing(bundled: Steered) -> None:
    body = ASKED | SEARCH | {"n": 4, "max_tokens": 20, "ignore_eos": True}
    url = f"{bundled.url}/v1/completions"

    def ask() -> list[list[int]]:
        reply = httpx.post(url, json=body, timeout=LIMIT_S)
        assert reply.status_code == 200, reply.text
        return [choice["token_ids"] for choice in reply.json()["choices"]]

    undisturbed = ask()
    assert len(undisturbed) == 4
    for victims in ((("tokenizer", 0), ("tokenizer", 1)), (("scheduler", 0),), (("worker", 0),)):
        with bundled.struck([lambda victims=victims: [bundled.kill(*victim) for victim in victims]], steps=5):
            assert ask() == undisturbed
