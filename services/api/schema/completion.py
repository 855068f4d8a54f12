"""The body of /v1/completions: one or many prompts, as text or as token ids. Pure."""

from typing import Annotated

import msgspec
from msgspec import Meta

from common.columns import pack_i32
from common.errors import Reject, RejectReason
from common.protocol import ModelFacts, PromptKind, Sampling, Submit
from services.api.errors import invalid
from services.api.logprobs import Form
from services.api.schema.beams import searching
from services.api.schema.generation import (
    ABSENT,
    I32_MAX,
    MAX_LOGPROBS,
    UNSUPPORTED,
    GenerationRequest,
    TokenId,
    check_common,
    check_ids,
    report_of,
    sampling_of,
    submit_fields,
)
from services.api.schema.parse import Body, one_of

DEFAULT_MAX_TOKENS = 16
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Annotated[int, Meta(ge=1, le=1024)] | None = None
    suffix: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=I32_MAX)] | None = None  # 0: only the prompt is looked at

    def form(self) -> Form:
        """Of `best_of` choices the `n` most probable ones, by the mean of their log-probabilities, are shown."""
        n = self.n or 1
        best = n if (self.best_of or n) > n else 0
        return super().form()._replace(shown=self.logprobs is not None, echoed=self.logprobs or 0, best=best)


UNSUPPORTED_IN_COMPLETION = UNSUPPORTED | {
    "prompt_embeds": ABSENT,
    "thinking_token_budget": ABSENT,
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


def sampling_in_completion(request: CompletionRequest, facts: ModelFacts, max_logprobs: int) -> Sampling:
    """With echo the prompt's tokens have log-probabilities like those of the output. Raises Reject."""
    report = report_of(request, facts, request.logprobs, max_logprobs)
    if request.echo and request.logprobs is not None:
        report = msgspec.structs.replace(report, prompt=max(request.logprobs, report.prompt))
    if request.form().best:
        report = msgspec.structs.replace(report, top=max(report.top, 0))
    if not silent(request):
        return sampling_of(request, facts, DEFAULT_MAX_TOKENS, report)
    one = msgspec.structs.replace(request, max_tokens=1, min_tokens=None, stop_token_ids=None, ignore_eos=True)
    return sampling_of(one, facts, DEFAULT_MAX_TOKENS, report)


def check_fields(request: CompletionRequest) -> None:
    """What cannot be said together. Raises Reject."""
    n, best_of = request.n or 1, request.best_of
    if request.echo and request.truncate_prompt_tokens:
        raise invalid("echo of a prompt that is truncated is not supported", "echo")
    if best_of is not None and best_of < n:
        raise invalid(f"best_of is {best_of}, less than n, {n}", "best_of")
    if best_of is not None and best_of > n and request.stream:
        raise invalid("best_of chooses among whole outputs, so that there is no stream of them", "best_of")
    if request.logprob_token_ids and silent(request):
        raise invalid("logprob_token_ids stand beside tokens of the output, and max_tokens is 0", "logprob_token_ids")
    if request.suffix and request.echo:
        raise invalid("echo and suffix exclude each other", "suffix")


def silent(request: CompletionRequest) -> bool:
    """Whether there shall be no output. The model draws a token all the same, which nobody gets."""
    return request.max_tokens == 0 and request.max_completion_tokens is None


def submits_of(
    request: CompletionRequest, facts: ModelFacts, max_choices: int, max_logprobs: int = MAX_LOGPROBS
) -> list[Submit]:
    """One Submit per prompt, so that choices come prompt by prompt, n of each. Raises Reject."""
    if len(request.prompt) > max(facts.max_model_len, max_choices) and not isinstance(request.prompt, str):
        # Before anything looks at each of millions of entries.
        text = f"prompt has {len(request.prompt)} entries; the context is {facts.max_model_len} tokens"
        raise Reject(RejectReason.TOO_LONG, text, "prompt")
    prompts = prompts_of(request)
    check_fields(request)
    n = max(request.n or 1, request.best_of or 1)
    check_common(request, facts, n * len(prompts), max_choices)
    fields = submit_fields(request) | {"n": n}
    if request.suffix:
        fields |= {"options": msgspec.structs.replace(fields["options"], suffix=request.suffix)}
    if silent(request):
        fields |= {"stop": (), "options": msgspec.structs.replace(fields["options"], silent=True)}
    submits = []
    for prompt in prompts:
        sampling = sampling_in_completion(request, facts, max_logprobs)
        if request.suffix and not isinstance(prompt, str):
            raise invalid("a prompt with a suffix is text, not token ids", "suffix")
        if isinstance(prompt, str):
            submits.append(Submit(seq_id=0, kind=PromptKind.TEXT, sampling=sampling, text=prompt, **fields))
        else:
            if len(prompt) > facts.max_model_len:
                text = f"prompt has {len(prompt)} tokens; the context is {facts.max_model_len}"
                raise Reject(RejectReason.TOO_LONG, text, "prompt")
            check_ids(prompt, facts, "prompt")
            tokens = pack_i32(prompt)
            submits.append(Submit(seq_id=0, kind=PromptKind.TOKENS, sampling=sampling, tokens=tokens, **fields))
    return [searching(request, submit) for submit in submits]
