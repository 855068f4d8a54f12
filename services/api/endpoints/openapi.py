"""GET /openapi.json: the document is made from the endpoints' lists and the structs of their bodies."""

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.api.endpoints.health import package_version
from services.api.errors import ErrorBody
from services.api.gateway import Gateway
from services.api.route import Endpoint, discover, json, offered

REFERENCE = "#/components/schemas/{name}"
PARAMETER = re.compile(r"{(\w+):?\w*}")


def document(endpoints: list[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1, as a JSON tree."""
    structs: list[Any] = [ErrorBody]
    for endpoint in endpoints:
        structs += [endpoint.body.struct] if endpoint.body else []
        structs += [endpoint.reply] if endpoint.reply else []
    schemas, components = msgspec.json.schema_components(structs, ref_template=REFERENCE)
    references = dict(zip(structs, schemas, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Valence", "version": package_version()},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(endpoint: Endpoint, references: dict[Any, Any]) -> dict[str, Any]:
    ok: dict[str, Any] = {"description": "Success"}
    if endpoint.reply:
        ok["content"] = {"application/json": {"schema": references[endpoint.reply]}}
    error = {"description": "Error", "content": {"application/json": {"schema": references[ErrorBody]}}}
    operation: dict[str, Any] = {
        "operationId": endpoint.handle.__name__ + "_" + endpoint.path.strip("/").replace("/", "_"),
        "summary": endpoint.summary,
        "responses": {"200": ok, "default": error},
    }
    if names := PARAMETER.findall(endpoint.path):
        text = {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    if endpoint.body:
        content = {"application/json": {"schema": references[endpoint.body.struct]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


async def openapi(gateway: Gateway, request: Request) -> Response:
    api = gateway.config.api
    return json(document([each for each in discover() if offered(each, api, admin=False)]))


ENDPOINTS = [Endpoint("GET", "/openapi.json", openapi, "This document")]
