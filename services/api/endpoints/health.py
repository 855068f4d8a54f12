"""Three signals, each 200 or 503 with what is wrong, in JSON; none of them needs a key or makes work.

/live: the loop turns, since it answers. /ready: every needed service has run a real step and this process is not on its
way out. /progress: nothing stands still while work waits. /health is ready and progress together. Each also has its
longer name, /health/live and so on.
"""

import importlib.metadata

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RejectReason
from services.api import errors
from services.api.gateway import Gateway, Missing
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
    return _refusal(gateway, _unready(gateway), absent) if absent else json(_ready(gateway))


async def progress(gateway: Gateway, request: Request) -> Response:
    """200 while steps advance or nothing waits, or 503 with the processes that stand still."""
    stalled = gateway.stalled()
    return _refusal(gateway, "stalled", stalled) if stalled else json(Health("progressing"))


async def health(gateway: Gateway, request: Request) -> Response:
    absent, stalled = gateway.missing(), gateway.stalled()
    if not (absent or stalled):
        return json(_ready(gateway))
    return _refusal(gateway, _unready(gateway) if absent else "stalled", list(dict.fromkeys(absent + stalled)))


async def version(gateway: Gateway, request: Request) -> Response:
    return json(Version(package_version()))


def _ready(gateway: Gateway) -> Health:
    """With what serves less than it should."""
    impaired = gateway.impaired()
    return Health("ready", [each.service for each in impaired], "; ".join(each.reason for each in impaired))


def _unready(gateway: Gateway) -> str:
    return "draining" if gateway.leaving else "unavailable"


def _refusal(gateway: Gateway, status: str, absent: list[Missing]) -> Response:
    reason = "; ".join(each.reason for each in absent)
    problem = errors.problem(503, reason, code=errors.CODES[RejectReason.UNAVAILABLE])
    body = {
        "status": status,
        "missing": [each.service for each in absent],
        "reason": reason,
        "error": errors.as_json(problem),
    }
    return json(body, 503, errors.headers_of(503, gateway.config.api.retry_after_s))


def package_version() -> str:
    try:
        return importlib.metadata.version("valence")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"  # run from a checkout that is not installed


LIVE = "200 while the event loop turns"
READY = "200 when requests can be served, else what is missing"
PROGRESS = "200 unless work waits and nothing is done, then where"
ENDPOINTS = [
    Endpoint("GET", "/health", health, "200 when ready and progressing", reply=Health, public=True),
    Endpoint("GET", "/health/live", live, LIVE, reply=Health, public=True),
    Endpoint("GET", "/health/ready", ready, READY, reply=Health, public=True),
    Endpoint("GET", "/health/progress", progress, PROGRESS, reply=Health, public=True),
    Endpoint("GET", "/live", live, LIVE, reply=Health, public=True),
    Endpoint("GET", "/ready", ready, READY, reply=Health, public=True),
    Endpoint("GET", "/progress", progress, PROGRESS, reply=Health, public=True),
    Endpoint("GET", "/ping", ready, "The same as /health/ready", reply=Health, public=True),
    Endpoint("GET", "/version", version, "Version of the server", reply=Version),
]
