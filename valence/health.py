"""Whether a process is ready, for the health checks of containers: `valence health`.

An API replica is asked over HTTP, at its own administrative address if it has one: the main one may be answered by a
sibling. The others are asked for at the scheduler. Without a name it is about the processes of this container.
"""

import http.client
import json
from typing import Any

from common import lease
from common.config import Config
from common.protocol import Status
from valence import rundir
from valence.errors import CommandError
from valence.live import trouble
from valence.programs import Program
from valence.status import StatusClient

ANSWER_S = 2.0


def programs_here(config: Config) -> list[Program]:
    """Processes with `--instance auto` in this PID namespace. Raises CommandError if there is none."""
    found = [Program(*each) for each in lease.here(config.run_dir)]
    if not found:
        raise CommandError(f"no process of {config.run_dir} with `--instance auto` runs in this container; name one")
    return found


def unready(program: Program, config: Config, client: StatusClient) -> str:
    """Why it is not ready; empty if it is."""
    if program.service == "api":
        return api_trouble(api_address(program.instance, config))
    status = client.ask()
    return member_trouble(program, status, config)


def member_trouble(program: Program, status: Status | None, config: Config) -> str:
    """What the schedulers say of a process that is no API."""
    if status is None:
        return "no scheduler answers"
    if why := trouble(program, status, config.links):
        return why
    states = [m.state for m in status.members if (m.peer.service, m.peer.instance) == program]
    return "" if states[0] == "ready" else f"it is {states[0]}"


def api_address(instance: int, config: Config) -> tuple[str, int]:
    """Host and port at which this replica itself answers, if one is its own, else the one that all share."""
    api = config.api
    if api.admin_port:
        return rundir.reachable(api.admin_host), api.admin_port + instance
    return rundir.reachable(api.host), api.port


def api_trouble(address: tuple[str, int]) -> str:
    """What /ready says against it."""
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        return "" if response.status == http.HTTPStatus.OK else reason_of(response.status, response.read())
    except (OSError, http.client.HTTPException) as error:
        return f"it does not answer at {address[0]}:{address[1]}: {error}"
    finally:
        connection.close()


def reason_of(status: int, body: bytes) -> str:
    """The words of a refusal of services/api/endpoints/health.py."""
    try:
        told: Any = json.loads(body)
        return f"{told['status']}: {told['reason']}"
    except (ValueError, KeyError, TypeError):
        return f"/ready answers {status}"
