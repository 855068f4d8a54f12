"""/admin: what is and what shall be, of all processes. Only for administrators.

API keys need no route: the file of keys is read again when it changes.
"""

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.protocol import Control
from services.api.gateway import Gateway
from services.api.route import Endpoint, json, read_body
from services.api.schema.parse import Body


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


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is not given stays as it is."""

    flush_prefix_cache: bool | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None  # of all processes
    profile: bool | None = None  # workers record their steps into run_dir/profiles
    drain: bool | None = None  # this replica is not ready, and serves on; false: it is again


class Controlled(msgspec.Struct, frozen=True):
    """`told`: all schedulers know; else ask again."""

    told: bool
    draining: bool


CONTROL = Body(ControlRequest)


async def control(gateway: Gateway, request: Request) -> Response:
    asked = CONTROL.parse(await read_body(request, gateway.config.api))
    if asked.drain is not None:
        gateway.set_leaving(asked.drain)
    told = gateway.control(Control(bool(asked.flush_prefix_cache), asked.log_level or "", asked.profile))
    return json(Controlled(told, gateway.leaving))


ENDPOINTS = [
    Endpoint("POST", "/admin/control", control, "Changes what runs", body=CONTROL, reply=Controlled, admin=True),
    Endpoint("GET", "/admin/status", status, "Processes, load and model", reply=SystemStatus, admin=True),
]
