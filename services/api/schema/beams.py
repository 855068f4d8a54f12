"""Beam search as requests ask for it, in the words of vLLM and transformers: its rules, and what is submitted. Pure."""

import msgspec

from common.protocol import Submit
from common.text_format import Beams
from services.api.errors import invalid
from services.api.schema.generation import GenerationRequest

MOST_BEAMS = 128
# Fields that a search does not heed, and what they may say all the same.
OTHERS: dict[str, tuple[object, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "thinking_token_budget": (-1,),
    "stop": ([],),
    "logit_bias": ({},),
    "bad_words": ([],),
    "logprob_token_ids": ([],),
    "echo": (False,),
    "suffix": ("",),
    **dict.fromkeys(("allowed_token_ids", "prompt_logprobs", "repetition_detection"), ()),
}


def searching(request: GenerationRequest, submit: Submit) -> Submit:
    """The submit of a prompt with as many beams as choices, if that is asked for. Raises Reject."""
    if not request.use_beam_search:
        for name, harmless in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(request, name) not in (None, harmless):
                raise invalid(f"{name} needs use_beam_search to be true", name)
        return submit
    if request.stream:
        text = "use_beam_search: which outputs are the best is known at the end, so that there is no stream of them"
        raise invalid(text, "stream")
    if submit.n > MOST_BEAMS:
        raise invalid(f"use_beam_search: {submit.n} beams are more than {MOST_BEAMS}", "n")
    for name, harmless_values in OTHERS.items():
        value = getattr(request, name, None)
        if value is not None and value not in harmless_values:
            raise invalid(f"{name} and use_beam_search exclude each other", name)
    if submit.sampling.grammar is not None or submit.options.calls is not None:
        raise invalid("structured output and use_beam_search exclude each other", "use_beam_search")
    if submit.options.silent:
        raise invalid("max_tokens of a beam search is at least 1", "max_tokens")
    early = 2 if request.early_stopping == "never" else int(bool(request.early_stopping))
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    options = msgspec.structs.replace(submit.options, beams=Beams(submit.n, penalty, early))
    return msgspec.structs.replace(submit, options=options)
