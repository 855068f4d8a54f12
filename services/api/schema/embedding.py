"""The body of /v1/embeddings: one or many texts, as text or as token ids, each to one vector; and the reply. Pure."""

from array import array
from base64 import b64encode
from math import isfinite
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.columns import pack_i32
from common.errors import Reject, RejectReason
from common.logprobs import Report
from common.pooling import Embedding, Pooling
from common.protocol import ModelFacts, Options, PromptKind, Sampling, Submit
from services.api.errors import invalid
from services.api.hub import Request
from services.api.logprobs import Form
from services.api.schema.completion import TokenIds
from services.api.schema.generation import ABSENT, I32_MAX, Milliseconds, TokenId, check_ids, check_model
from services.api.schema.parse import Body, Harmless, one_of

MAX_INPUTS = 2048  # OpenAI's, whose clients divide what is more


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    input: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=I32_MAX)] | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None  # vLLM's newer name of it
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=I32_MAX)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=I32_MAX)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    deadline_ms: Milliseconds | None = None
    user: str | None = None  # accepted, not used
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}\Z")] | None = None

    @property
    def stream(self) -> None:
        """Vectors come together."""

    def form(self) -> Form:
        return Form()


UNSUPPORTED: dict[str, Harmless] = {
    "messages": ABSENT,
    "stream": one_of(False),
    "truncation_side": one_of("right"),
    "embed_dtype": one_of("float32"),
    "endianness": one_of("native", "little"),
    "additional_data": ABSENT,
    "mm_processor_kwargs": ABSENT,
}
BODY = Body(EmbeddingRequest, UNSUPPORTED)


class Vector(msgspec.Struct, frozen=True):
    index: int
    embedding: list[float] | str  # base64 of float32, little-endian
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class VectorList(msgspec.Struct, frozen=True):
    data: list[Vector]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


def inputs_of(request: EmbeddingRequest) -> list[str | list[int]]:
    """In order. Raises Reject if there are too many, or strings and token ids are mixed."""
    given = request.input
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise invalid("input mixes strings and token ids; give one kind", "input")
    if kinds == {int}:
        return [[item for item in given if isinstance(item, int)]]
    if len(given) > MAX_INPUTS:
        raise invalid(f"input has {len(given)} entries, more than {MAX_INPUTS}", "input")
    return [item for item in given if not isinstance(item, int)]


def pooling_of(request: EmbeddingRequest, model: Embedding) -> Pooling:
    """What the request says, else what the model was made for. Raises Reject for what it cannot give."""
    if not model.size:
        raise invalid(f"this model gives no embeddings: {model.lacks or 'its worker tells of none'}", "model")
    if None not in (request.normalize, request.use_activation) and request.normalize != request.use_activation:
        raise invalid("normalize and use_activation say opposite things", "use_activation")
    normalize = request.use_activation if request.normalize is None else request.normalize
    wanted = request.dimensions or model.size
    if wanted != model.size and (model.lengths is None or not 1 <= wanted < model.size):
        raise invalid(f"dimensions is {wanted}; this model's embeddings have {model.size}", "dimensions")
    if wanted != model.size and model.lengths and wanted not in model.lengths:
        allowed = ", ".join(map(str, model.lengths))
        raise invalid(f"dimensions is {wanted}; this model's embeddings can be cut to {allowed}", "dimensions")
    return Pooling(
        request.pooling or model.mode,
        model.normalize if normalize is None else normalize,
        wanted if wanted != model.size else 0,
    )


def submits_of(request: EmbeddingRequest, facts: ModelFacts) -> list[Submit]:
    """One per input. Raises Reject."""
    check_model(request.model, facts)
    sampling = Sampling(0, temperature=0.0, report=Report(pooling=pooling_of(request, facts.embedding)))
    options = Options(keep_tokens=request.truncate_prompt_tokens or 0, plain=request.add_special_tokens is False)
    common = Submit(
        0,
        PromptKind.TEXT,
        sampling,
        options=options,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
    )
    submits = []
    for given in inputs_of(request):
        if isinstance(given, str):
            submits.append(msgspec.structs.replace(common, text=given))
            continue
        if len(given) > facts.max_model_len and not options.keep_tokens:
            text = f"input has {len(given)} tokens; the context is {facts.max_model_len}"
            raise Reject(RejectReason.TOO_LONG, text, "input")
        check_ids(given, facts, "input")
        submits.append(msgspec.structs.replace(common, kind=PromptKind.TOKENS, tokens=pack_i32(given)))
    return submits


def reply_of(request: EmbeddingRequest, model: str, done: Request) -> VectorList:
    """Raises Reject for numbers that are none."""
    data, tokens = [], 0
    for index, choice in enumerate(done.choices):
        assert choice.finished is not None
        values = array("f", choice.finished.vector)
        if not values or not isfinite(sum(values)):
            raise Reject(RejectReason.INTERNAL, f"the model gave no finite numbers for input {index}")
        as_text = request.encoding_format == "base64"
        data.append(Vector(index, b64encode(values).decode() if as_text else values.tolist()))
        tokens += choice.finished.prompt_tokens
    return VectorList(data, model, EmbeddingUsage(tokens, tokens))
