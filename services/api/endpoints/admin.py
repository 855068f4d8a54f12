"""GET /admin/status: every process, the load and the model, as the scheduler last told. Only for administrators."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.api.gateway import Gateway
from services.api.route import Endpoint, json


class ProcessStatus(msgspec.Struct, frozen=True):
    service: str
    instance: int
    pid: int
    state: str
    since: float  # Unix time
    progress: int
    stage: str | None
    figures: dict[str, float]


class SystemStatus(msgspec.Struct, frozen=True):
    ready: bool
    missing: list[str]
    processes: list[ProcessStatus]
    load: dict[str, float]
    model: dict[str, Any] | None


async def status(gateway: Gateway, request: Request) -> Response:
    view = gateway.node.view
    processes = [
        ProcessStatus(
            member.peer.service,
            member.peer.instance,
            member.peer.pid,
            member.state,
            member.peer.since_s,
            member.progress,
            member.stage.stage if member.stage else None,
            member.counters,
        )
        for member in view.members.values()
    ]
    missing = [each.reason for each in gateway.missing()]
    model = msgspec.structs.asdict(view.model) if view.model else None
    return json(SystemStatus(not missing, missing, processes, msgspec.structs.asdict(view.load), model))


ENDPOINTS = [
    Endpoint("GET", "/admin/status", status, "Processes, load and model", reply=SystemStatus, admin=True),
]
