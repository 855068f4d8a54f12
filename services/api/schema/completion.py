"""The body of /v1/completions: one or many prompts, as text or as token ids. Pure."""

from typing import Annotated

from msgspec import Meta

from common.columns import pack_i32
from common.errors import Reject, RejectReason
from common.protocol import ModelFacts, PromptKind, Submit
from services.api.errors import invalid
from services.api.schema.generation import (
    ABSENT,
    UNSUPPORTED,
    GenerationRequest,
    TokenId,
    check_common,
    check_ids,
    sampling_of,
    submit_fields,
)
from services.api.schema.parse import Body, one_of

DEFAULT_MAX_TOKENS = 16
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    echo: bool | None = None


UNSUPPORTED_IN_COMPLETION = UNSUPPORTED | {
    "logprobs": ABSENT,
    "suffix": one_of(""),
    "prompt_embeds": ABSENT,
    "add_special_tokens": one_of(True),
}
BODY = Body(CompletionRequest, UNSUPPORTED_IN_COMPLETION)


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts in order. Raises Reject if strings and token ids are mixed."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise invalid("prompt mixes strings and token ids; give one kind", "prompt")
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def submits_of(request: CompletionRequest, facts: ModelFacts, max_choices: int) -> list[Submit]:
    """One Submit per prompt, so that choices come prompt by prompt, n of each. Raises Reject."""
    if len(request.prompt) > max(facts.max_model_len, max_choices) and not isinstance(request.prompt, str):
        # Before anything looks at each of millions of entries.
        text = f"prompt has {len(request.prompt)} entries; the context is {facts.max_model_len} tokens"
        raise Reject(RejectReason.TOO_LONG, text, "prompt")
    prompts = prompts_of(request)
    if request.echo and request.truncate_prompt_tokens:
        raise invalid("echo of a prompt that is truncated is not supported", "echo")
    check_common(request, facts, (request.n or 1) * len(prompts), max_choices)
    fields = submit_fields(request)
    submits = []
    for prompt in prompts:
        sampling = sampling_of(request, facts, DEFAULT_MAX_TOKENS)
        if isinstance(prompt, str):
            submits.append(Submit(seq_id=0, kind=PromptKind.TEXT, sampling=sampling, text=prompt, **fields))
        else:
            if len(prompt) > facts.max_model_len:
                text = f"prompt has {len(prompt)} tokens; the context is {facts.max_model_len}"
                raise Reject(RejectReason.TOO_LONG, text, "prompt")
            check_ids(prompt, facts, "prompt")
            tokens = pack_i32(prompt)
            submits.append(Submit(seq_id=0, kind=PromptKind.TOKENS, sampling=sampling, tokens=tokens, **fields))
    return submits
