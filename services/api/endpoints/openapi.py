"""GET /openapi.json: the document is made from the endpoints' lists and the structs of their bodies."""

import re
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.api import deadline
from services.api.endpoints.health import package_version
from services.api.errors import AnthropicErrorBody, ErrorBody, of_anthropic
from services.api.gateway import Gateway
from services.api.route import Endpoint, discover, json, offered

REFERENCE = "#/components/schemas/{name}"
# What any endpoint may answer, and those that read a body. All have the error object.
ANY_ERRORS = (400, 401, 404, 405, 408, 413, 429, 431, 500, 503)
MEANINGS = {status: HTTPStatus(status).phrase for status in (*ANY_ERRORS, 504)}
HEADERS = {
    "x-request-id": (
        "names the request in answers and logs",
        {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    ),
    deadline.HEADER: ("its deadline, from its arrival", {"type": "integer", "minimum": 1, "maximum": deadline.MAX_MS}),
}
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]}},
}
PARAMETER = re.compile(r"{(\w+):?\w*}")


def document(endpoints: list[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1, as a JSON tree."""
    structs: list[Any] = [ErrorBody, AnthropicErrorBody]
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
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, references: dict[Any, Any]) -> dict[str, Any]:
    answer = references[endpoint.reply] if endpoint.reply else {}
    ok: dict[str, Any] = {"description": "Success", "content": {endpoint.media_type: {"schema": answer}}}
    if endpoint.body and "stream" in endpoint.body.struct.__struct_fields__:
        ok["content"]["text/event-stream"] = {}  # each event's data is a chunk; OpenAPI 3.1 cannot say so
    body = AnthropicErrorBody if of_anthropic(endpoint.path) else ErrorBody
    error = {"application/json": {"schema": references[body]}}
    statuses = (*ANY_ERRORS, 504) if endpoint.body else ANY_ERRORS
    errors = {str(status): {"description": MEANINGS[status], "content": error} for status in statuses}
    operation: dict[str, Any] = {
        "operationId": endpoint.handle.__name__ + "_" + endpoint.path.strip("/").replace("/", "_"),
        "summary": endpoint.summary,
        "responses": {"200": ok, **errors, "default": {"description": "Error", "content": error}},
        "security": [{}] if endpoint.public else [{}, {"key": []}],
    }
    text = {"type": "string"}
    names = PARAMETER.findall(endpoint.path)
    parameters: list[Any] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    for name, (meaning, schema) in HEADERS.items() if endpoint.body else ():
        parameters.append({"name": name, "in": "header", "description": meaning, "schema": schema})
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body:
        content = {"application/json": {"schema": references[endpoint.body.struct]}}
        operation["requestBody"] = {"required": True, "content": content}
    if endpoint.form:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}
    return operation


async def openapi(gateway: Gateway, request: Request) -> Response:
    api = gateway.config.api
    return json(document([each for each in discover() if offered(each, api, admin=False)]))


ENDPOINTS = [Endpoint("GET", "/openapi.json", openapi, "This document")]
