"""Fields that chat and text completions share, their rules, and the `Sampling` and `Submit` made from them. Pure.

Ranges are OpenAI's; where OpenAI has no such field, vLLM's. Null stands for "not given" everywhere.
"""

import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.errors import Reject, RejectReason
from common.logprobs import Report
from common.protocol import ModelFacts, Options, Sampling, Words
from common.text_format import Repetition
from services.api.errors import invalid
from services.api.logprobs import Form
from services.api.schema.parse import Harmless, anything, one_of
from services.api.schema.structured import StructuredFields, grammar_of

I32_MAX = 2**31 - 1
Tokens = Annotated[int, Meta(ge=1, le=I32_MAX)]
Milliseconds = Annotated[int, Meta(ge=1, le=I32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=I32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
PatternSize = Annotated[int, Meta(ge=0, le=1024)]
MAX_STOPS = 64
MAX_ALLOWED, MAX_BAD_WORDS = 4096, 256
MAX_LOGPROBS, MAX_NAMED = 20, 128
NO_REPORT = Report()


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # every chunk has the usage so far


class RepetitionDetection(msgspec.Struct, frozen=True):
    """Ends an output whose last tokens are one pattern `min_count` times. Of no size there is none to look for."""

    max_pattern_size: PatternSize = 0
    min_pattern_size: PatternSize = 0
    min_count: TokenId = 0


class GenerationRequest(StructuredFields, frozen=True, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=I32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=I32_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-9, le=1000)] | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=I32_MAX)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    deadline_ms: Milliseconds | None = None  # from the request's arrival to its last token
    user: str | None = None  # accepted, not used
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}\Z")] | None = None  # before the header's
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=I32_MAX)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_NAMED)] | None = None  # beside each output token
    prompt_logprobs: Annotated[int, Meta(ge=0, le=I32_MAX)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    repetition_detection: RepetitionDetection | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None

    def form(self) -> Form:
        """How it wants to be told."""
        prompt = -1 if self.prompt_logprobs is None else self.prompt_logprobs
        return Form(bool(self.return_tokens_as_token_ids), prompt, ordered=bool(self.use_beam_search))


EMPTY_LIST: Harmless = one_of([])
OFF: Harmless = one_of(False)
ABSENT: Harmless = one_of()
UNSUPPORTED: dict[str, Harmless] = {
    "stop_regex": ABSENT,
    "truncation_side": one_of("left"),  # truncate_prompt_tokens keeps the end
    "spaces_between_special_tokens": one_of(True, False),  # tokens are joined as the tokenizer joins them
    "kv_transfer_params": ABSENT,
    "logits_processors": EMPTY_LIST,
    "vllm_xargs": one_of({}),
    "service_tier": one_of("auto", "default"),
    "store": OFF,
    # Labels and hints that change nothing in the answer.
    "metadata": anything,
    "safety_identifier": anything,
    "prompt_cache_key": anything,
}


def sampling_of(
    request: GenerationRequest, facts: ModelFacts, default_max_tokens: int, report: Report = NO_REPORT
) -> Sampling:
    """The resolved sampling of one prompt; a seed that is not given is drawn here. Raises Reject.

    `default_max_tokens` 0 leaves the limit to the tokenizer, which knows what is left of the context.
    """
    max_tokens = request.max_completion_tokens or request.max_tokens or default_max_tokens
    min_tokens = request.min_tokens or 0
    if max_tokens and min_tokens > max_tokens:
        raise invalid(f"min_tokens {min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
    check_ids(request.stop_token_ids or [], facts, "stop_token_ids")
    check_allowed(request, facts, min_tokens)
    bias = request.logit_bias or {}
    check_ids(list(bias), facts, "logit_bias")
    seed = secrets.randbits(63) if request.seed is None else request.seed % 2**64
    return Sampling(
        max_tokens=max_tokens,
        seed=seed,
        temperature=given(request.temperature, 1.0),
        top_p=given(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=given(request.repetition_penalty, 1.0),
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=tuple(bias.items()),
        grammar=grammar_of(request),
        report=report,
        words=Words(tuple(request.allowed_token_ids or ())),
    )


def check_allowed(request: GenerationRequest, facts: ModelFacts, min_tokens: int) -> None:
    """Raises Reject where in the end no token could come."""
    allowed = request.allowed_token_ids
    if allowed is None:
        return
    check_ids(allowed, facts, "allowed_token_ids")
    ends = {*facts.eos_token_ids, *(request.stop_token_ids or ())}
    if min_tokens and ends.issuperset(allowed):
        raise invalid("allowed_token_ids has only tokens that end, which min_tokens forbids", "allowed_token_ids")
    if grammar_of(request) is not None:
        raise invalid("allowed_token_ids and a grammar exclude each other", "allowed_token_ids")


def report_of(
    request: GenerationRequest, facts: ModelFacts, top: int | None, most: int, param: str = "logprobs"
) -> Report:
    """`top`: best tokens beside each of the output's, by the field `param`; None: no log-probabilities of it.

    Named tokens come in their place. Raises Reject for more than `most` best ones.
    """
    for value, name in ((top, param), (request.prompt_logprobs, "prompt_logprobs")):
        if value is not None and not 0 <= value <= most:
            raise invalid(f"{name} is {value}, not between 0 and {most}", name)
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("prompt_logprobs comes with whole replies only, not with streams", "prompt_logprobs")
    named = tuple(dict.fromkeys(request.logprob_token_ids or ()))
    if named and top is None:
        raise invalid("logprob_token_ids needs logprobs", "logprob_token_ids")
    check_ids(list(named), facts, "logprob_token_ids")
    prompt = -1 if request.prompt_logprobs is None else request.prompt_logprobs
    return Report(len(named) or (-1 if top is None else top), prompt, named=named)


def repetition_of(request: GenerationRequest) -> Repetition | None:
    """Raises Reject."""
    asked = request.repetition_detection
    if asked is None:
        return None
    smallest, largest = asked.min_pattern_size, asked.max_pattern_size
    if smallest > largest:
        text = f"min_pattern_size {smallest} is more than max_pattern_size {largest}"
        raise invalid(f"repetition_detection: {text}", "repetition_detection.min_pattern_size")
    if largest and asked.min_count < 2:
        text = f"repetition_detection: min_count must be at least 2, not {asked.min_count}"
        raise invalid(text, "repetition_detection.min_count")
    return Repetition(largest, max(smallest, 1), asked.min_count) if largest else None


def given(value: float | None, default: float) -> float:
    return default if value is None else value


def stops_of(request: GenerationRequest) -> tuple[str, ...]:
    if isinstance(request.stop, str):
        return (request.stop,)
    return tuple(request.stop or ())


def check_ids(ids: list[int], facts: ModelFacts, param: str) -> None:
    """Raises Reject if a token id is outside the vocabulary."""
    for token in ids:
        if not 0 <= token < facts.vocab_size:
            raise invalid(f"{param}: token id {token} is outside the vocabulary of {facts.vocab_size}", param)


def check_common(request: GenerationRequest, facts: ModelFacts, choices: int, max_choices: int) -> None:
    """Rules that span fields. `choices` counts n times prompts. Raises Reject."""
    check_model(request.model, facts)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is allowed only when stream is true", "stream_options")
    if choices > max_choices:
        raise invalid(f"{choices} choices (n times prompts) are more than the {max_choices} allowed", "n")


def check_model(model: str | None, facts: ModelFacts) -> None:
    if model is not None and model != facts.name:
        raise Reject(RejectReason.NOT_FOUND, f"the model {model!r:.200} does not exist; {facts.name} does", "model")


def wants_usage(request: GenerationRequest) -> bool:
    options = request.stream_options
    return options is not None and bool(options.include_usage or continuous_usage(request))


def continuous_usage(request: GenerationRequest) -> bool:
    """Whoever says that no usage is wanted gets none."""
    options = request.stream_options
    return options is not None and bool(options.continuous_usage_stats) and options.include_usage is not False


def submit_fields(request: GenerationRequest, prompt_end: int = 0) -> dict[str, Any]:
    """What a Submit of this request carries whatever its prompt is."""
    ids = bool(request.return_token_ids)
    keep, tell = request.truncate_prompt_tokens or 0, continuous_usage(request) or ids
    return {
        "options": Options(
            prompt_end, keep, tell, ids, bad_words=tuple(request.bad_words or ()), repetition=repetition_of(request)
        ),
        "n": request.n or 1,
        "stop": stops_of(request),
        "include_stop": bool(request.include_stop_str_in_output),
        "skip_special_tokens": request.skip_special_tokens is not False,
        "priority": request.priority or 0,
        "cache_salt": request.cache_salt or "",
    }
