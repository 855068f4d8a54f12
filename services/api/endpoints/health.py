"""Health: /health/live (the loop turns), /health/ready and /health (it can serve), /ping and /version."""

import importlib.metadata

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RejectReason
from services.api import errors
from services.api.gateway import Gateway
from services.api.route import Endpoint, json


class Health(msgspec.Struct, frozen=True):
    status: str
    missing: list[str] = []
    reason: str = ""


class Version(msgspec.Struct, frozen=True):
    version: str


async def live(gateway: Gateway, request: Request) -> Response:
    return json(Health("live"))


async def ready(gateway: Gateway, request: Request) -> Response:
    """200, or 503 with the services that are missing and why."""
    absent = gateway.missing()
    if not absent:
        impaired = gateway.impaired()
        return json(Health("ready", [each.service for each in impaired], "; ".join(each.reason for each in impaired)))
    reason = "; ".join(each.reason for each in absent)
    problem = errors.problem(503, reason, code=errors.CODES[RejectReason.UNAVAILABLE])
    body = {
        "status": "draining" if gateway.draining else "unavailable",
        "missing": [each.service for each in absent],
        "reason": reason,
        "error": errors.as_json(problem),
    }
    return json(body, 503, errors.headers_of(503, gateway.config.api.retry_after_s))


async def version(gateway: Gateway, request: Request) -> Response:
    return json(Version(package_version()))


def package_version() -> str:
    try:
        return importlib.metadata.version("valence")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"  # run from a checkout that is not installed


ENDPOINTS = [
    Endpoint("GET", "/health", ready, "200 when requests can be served", reply=Health, public=True),
    Endpoint("GET", "/health/live", live, "200 while the process runs", reply=Health, public=True),
    Endpoint(
        "GET",
        "/health/ready",
        ready,
        "200 when requests can be served, else what is missing",
        reply=Health,
        public=True,
    ),
    Endpoint("GET", "/ping", ready, "The same as /health", reply=Health, public=True),
    Endpoint("GET", "/version", version, "Version of the server", reply=Version),
]
