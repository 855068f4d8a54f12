"""POST /v1/embeddings: each input is a request that generates nothing and ends with its vector."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from common.protocol import Submit
from services.api.gateway import Gateway
from services.api.generate import begin, collect
from services.api.hub import Choice, Request
from services.api.route import Endpoint, json, read_body
from services.api.schema.conversion import renamed
from services.api.schema.embedding import BODY, EmbeddingRequest, VectorList, reply_of, submits_of


async def embeddings(gateway: Gateway, http: HttpRequest) -> Response:
    body = await read_body(http, gateway.config.api)
    facts = gateway.facts()
    asked = BODY.parse(body)
    submits = submits_of(asked, facts)
    with renamed({"prompt": "input"}):
        done = await pooled(gateway, http, asked, submits)
    return json(reply_of(asked, facts.name, done))


async def pooled(gateway: Gateway, http: HttpRequest, asked: EmbeddingRequest, submits: list[Submit]) -> Request:
    """All inputs, in their order; no more at once than a request may have choices. Raises Reject."""
    earlier: list[Choice] = []
    for start in range(0, len(submits), gateway.max_choices):
        begun = begin(gateway, http, asked, submits[start : start + gateway.max_choices])
        begun.request.choices[:0] = earlier  # its key is charged for all of them
        if trace := http.scope["state"].get("trace"):
            trace.operation = "embeddings"
        await collect(gateway, *begun)
        earlier = begun.request.choices
    return begun.request


ENDPOINTS = [
    Endpoint(
        "POST", "/v1/embeddings", embeddings, "Texts or tokens to vectors", body=BODY, reply=VectorList, batched=True
    )
]
