"""Loglikelihoods over HTTP against transformers' on the same weights, asked for as lm-eval's local-completions does.

`python -m benchmarks.loglikelihood [--pairs N] [--url URL]`: without a URL it starts a system with the bundled model in
the exact mode. Prints the largest difference; ends with an error if it exceeds 1e-3 or a greedy verdict differs.
"""

import argparse
import json
import random
import sys
import urllib.request
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.system import System
from services.worker.source import open_model

CLOSE = 1e-3
BATCH = 16
Pair = tuple[list[int], list[int]]  # context and continuation


class Reference:
    """The bundled model in transformers, float32."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM  # seconds: only where it runs

        source = open_model("bundled")
        self._model = LlamaForCausalLM(LlamaConfig(**source.config))
        weights = {name: tensor.dense(torch.float32) for name, tensor in source.tensors.items()}
        self._model.load_state_dict(weights, strict=False)
        self._model.tie_weights()
        self._model.eval()
        self.vocab_size = int(self._model.config.vocab_size)

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), V], row i of what follows token i."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits.log_softmax(-1)

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), N], behind the final norm."""
        with torch.inference_mode():
            states: torch.Tensor = self._model.model(torch.tensor([tokens])).last_hidden_state[0]
        return states

    def loglikelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Its sum, and whether each token is the most probable one."""
        rows = self.logprobs([*context, *continuation])[len(context) - 1 : -1]
        own = rows.gather(1, torch.tensor(continuation)[:, None])
        return float(own.sum()), rows.argmax(-1).tolist() == continuation


def ask(url: str, pairs: list[Pair]) -> list[tuple[float, bool]]:
    """The same by the server, as lm-eval reads it out of a reply."""
    prompts = [[*context, *continuation] for context, continuation in pairs]
    body: dict[str, Any] = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body | {"seed": 1234}).encode(), headers)
    with urllib.request.urlopen(request) as response:
        choices = sorted(json.load(response)["choices"], key=lambda choice: choice["index"])
    found = []
    for choice, (context, _) in zip(choices, pairs, strict=True):
        own = choice["logprobs"]["token_logprobs"][len(context) : -1]
        best = choice["logprobs"]["top_logprobs"][len(context) : -1]
        found.append((sum(own), all(value == max(top.values()) for value, top in zip(own, best, strict=True))))
    return found


def make_pairs(count: int, vocab_size: int) -> list[Pair]:
    """Random ids; many contexts begin alike, as those of a task do."""
    source = random.Random(0)
    common = [source.randrange(300, vocab_size) for _ in range(40)]

    def ids(count: int) -> list[int]:
        return [source.randrange(300, vocab_size) for _ in range(count)]

    return [
        (common[: source.randrange(41)] + ids(source.randrange(1, 60)), ids(source.randrange(1, 9)))
        for _ in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--url", default="")
    options = parser.parse_args()
    reference = Reference()
    pairs = make_pairs(options.pairs, reference.vocab_size)
    with System("model.dtype=float32") if not options.url else nullcontext() as system:
        url = options.url or (system.url if system else "")
        told = [each for at in range(0, len(pairs), BATCH) for each in ask(url, pairs[at : at + BATCH])]
    wanted = [reference.loglikelihood(*pair) for pair in pairs]
    worst = max(abs(ours - theirs) for (ours, _), (theirs, _) in zip(told, wanted, strict=True))
    verdicts = sum(ours != theirs for (_, ours), (_, theirs) in zip(told, wanted, strict=True))
    print(f"{len(pairs)} continuations: largest difference {worst:.1e}, {verdicts} greedy verdicts differ")
    sys.exit(worst > CLOSE or verdicts > 0)


if __name__ == "__main__":
    main()
