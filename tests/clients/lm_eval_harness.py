"""lm-eval's local-completions against a running server, and against transformers with the same weights.

`pip install --no-deps lm-eval tenacity` beside Valence, then as tests/clients/checks.py says; the server with
`model.dtype=float32`. The largest difference of a loglikelihood must stay under 1e-3 and greedy verdicts must agree.
"""

import json
import sys
import urllib.request
from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from benchmarks.loglikelihood import CLOSE, Reference, make_pairs
from tests.clients.checks import MODEL, run

TEXTS = (
    ("The capital of France is", " Paris"),
    ("The capital of France is", " Rome"),
    ("Water boils at one hundred degrees", " Celsius."),
    ("Er aß die Äpfel \N{BANANA}", " gern \N{BANANA}"),
)


def ids(url: str, text: str) -> list[int]:
    body = json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(f"{url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        tokens: list[int] = json.load(response)["tokens"]
    return tokens


def harness(url: str) -> Any:
    # its tokenizer is the server's: /tokenizer_info, /tokenize and /detokenize
    fields: dict[str, Any] = {"tokenizer_backend": "remote", "tokenized_requests": True, "batch_size": 4}
    return LocalCompletionsAPI(base_url=f"{url}/v1/completions", model=MODEL, max_length=2048, **fields)


def loglikelihood(url: str) -> None:
    reference = Reference()
    pairs = [(ids(url, context), ids(url, continuation)) for context, continuation in TEXTS]
    pairs += make_pairs(4, reference.vocab_size)
    asked = [(("", str(number)), *pair) for number, pair in enumerate(pairs)]
    answers = harness(url)._loglikelihood_tokens(asked, disable_tqdm=True)
    differences = []
    for pair, (total, greedy) in zip(pairs, answers, strict=True):
        meant, is_greedy = reference.loglikelihood(*pair)
        differences.append(abs(total - meant))
        assert greedy == is_greedy, pair
    print(f"largest difference of {len(pairs)} loglikelihoods: {max(differences):.1e}")
    assert max(differences) < CLOSE


if __name__ == "__main__":
    sys.exit(run("lm_eval", loglikelihood))
