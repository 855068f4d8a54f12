"""Settings that do not go together are refused by name; those that do are tested in test_drafts and test_proposers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.config import Speculative
from common.errors import ConfigError
from services.worker.drafting import Smaller, choose_drafting
from services.worker.kernels.registry import Facts, bind
from services.worker.memory import Shape


def test_a_head_drafts_one_token_unless_told_otherwise() -> None:
    drafts = [Speculative(method=method).drafts for method in ("", "ngram", "draft", "mtp")]
    assert drafts == [0, 4, 4, 1] and Speculative(method="mtp", tokens=3).drafts == 3


def test_without_a_method_there_are_no_drafts(tiny: Any) -> None:
    assert choose_drafting(Speculative(), tiny.decoder, Shape(4, 200, 8), load=lambda name: tiny) is None


@pytest.mark.parametrize(
    ("settings", "changes", "text"),
    [
        (Speculative(method="draft"), {}, "a draft model needs both"),
        (Speculative(method="ngram", model="x"), {}, "a draft model needs both"),
        (Speculative(method="ngram", ngram_min=5, ngram_max=3), {}, "ngram_max is 3, less than speculative.ngram_min"),
        (Speculative(method="draft", model="x"), {"vocab_size": 130}, "has 130 token ids, the model 131"),
        (Speculative(method="draft", model="x"), {"max_position": 100}, "at most 100 tokens, the model runs 200"),
    ],
)
def test_what_cannot_be_is_said(
    make_tiny: Callable[[str], Any], settings: Speculative, changes: dict[str, int], text: str
) -> None:
    tiny, bindings = make_tiny("llama"), bind(("torch",), Facts("cpu"))

    class Small:
        spec = replace(tiny.decoder.spec, **changes)
        final_norm = tiny.decoder.final_norm

    def load(name: str) -> Smaller:
        return Smaller(Small(), bindings, torch.float32)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=text):
        choose_drafting(settings, tiny.decoder, Shape(4, 200, 8), load)
