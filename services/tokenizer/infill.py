"""Prompts with a suffix: the model fills in what stands between, if its vocabulary has tokens for that. Pure.

Forms are those of the families' own documentation; which one a model has is told by the names of its tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.errors import Reject, RejectReason


class Form(NamedTuple):
    """Names of the tokens before the prefix, before the suffix and before what is filled in."""

    prefix: str
    suffix: str
    middle: str  # empty: none, and the suffix comes first


FORMS = (
    Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    Form("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Form("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Form("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)


def filled_in(
    prefix: Sequence[int], suffix: Sequence[int], lead: Sequence[int], id_of: Callable[[str], int | None]
) -> list[int]:
    """The whole prompt. lead: what every text of this tokenizer begins with; prefix and suffix are without it.

    Raises Reject for a vocabulary without such tokens.
    """
    for form in FORMS:
        ids = [id_of(name) for name in form if name]
        known = [token for token in ids if token is not None]
        if len(known) < len(ids):
            continue
        if form.middle:
            return [*lead, known[0], *prefix, known[1], *suffix, known[2]]
        return [*lead, known[1], *suffix, known[0], *prefix]
    raise Reject(RejectReason.INVALID, "this model has no tokens for a suffix: it only continues texts", "suffix")
