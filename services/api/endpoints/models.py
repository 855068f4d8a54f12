"""GET /v1/models and /v1/models/{model}."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.api.gateway import Gateway
from services.api.route import Endpoint, json
from services.api.schema.generation import check_model


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    root: str
    object: Literal["model"] = "model"
    owned_by: str = "valence"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


def card(gateway: Gateway) -> ModelCard:
    facts = gateway.facts()
    return ModelCard(facts.name, int(gateway.since_s), facts.max_model_len, facts.name)


async def list_models(gateway: Gateway, request: Request) -> Response:
    return json(ModelList([card(gateway)]))


async def show_model(gateway: Gateway, request: Request) -> Response:
    check_model(request.path_params["model"], gateway.facts())
    return json(card(gateway))


ENDPOINTS = [
    Endpoint("GET", "/v1/models", list_models, "The models served", reply=ModelList),
    Endpoint("GET", "/v1/models/{model:path}", show_model, "One model", reply=ModelCard),
]
