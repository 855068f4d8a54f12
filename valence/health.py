"""Whether a process is ready, for the health checks of containers: `valence health`. And the end of one that hangs.

Docker calls a container unhealthy and does no more; so the check itself kills what `valence serve` would (watch.py).
An API replica is asked over HTTP, at its own administrative address if it has one: the main one may be answered by a
sibling. The others are asked for at the scheduler. Without a name it is about the processes of this container.
"""

import contextlib
import http.client
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from common import lease
from common.config import Config
from common.lease import Holder
from common.protocol import Status
from valence import rundir
from valence.errors import CommandError
from valence.live import trouble
from valence.programs import Program
from valence.status import StatusClient

ANSWER_S = 2.0
HUNG_S = 30.0  # a restarted scheduler, and a slow start, are over in less


def holders_here(config: Config) -> list[Holder]:
    """Processes with `--instance auto` in this PID namespace. Raises CommandError if there is none."""
    found = list(lease.here(config.run_dir))
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


def hangs(program: Program, config: Config, client: StatusClient) -> str:
    """Why it should be started anew; empty if it lives, or nobody can tell."""
    if program.service == "api":
        return api_trouble(api_address(program.instance, config), "/live")
    return trouble(program, client.ask(), config.links)


def hung_s(mark: Path, pid: int, hanging: bool, now_s: float) -> float:
    """For how long every look at that process has found it hanging. `mark` remembers the first of them."""
    if not hanging:
        mark.unlink(missing_ok=True)
        return 0.0
    try:
        marked_pid, _, since = mark.read_text().partition(" ")
        if int(marked_pid) == pid and (since_s := float(since)) <= now_s:
            return now_s - since_s
    except (OSError, ValueError):
        pass
    mark.write_text(f"{pid} {now_s}")
    return 0.0


def end_if_hung(holder: Holder, config: Config, client: StatusClient) -> str:
    """Kills it if it has hung for HUNG_S. What was done, empty if nothing."""
    program = Program(holder.service, holder.number)
    reason = hangs(program, config, client)
    passed_s = hung_s(config.run_dir / f"{program.name}.hangs", holder.pid, bool(reason), time.monotonic())
    if passed_s < HUNG_S:
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(holder.pid, signal.SIGKILL)
    return f"it has hung for {passed_s:.0f} s ({reason}); killed"


def api_trouble(address: tuple[str, int], path: str = "/ready") -> str:
    """What the API says against itself."""
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return "" if response.status == http.HTTPStatus.OK else reason_of(path, response.status, response.read())
    except (OSError, http.client.HTTPException) as error:
        return f"it does not answer at {address[0]}:{address[1]}: {error}"
    finally:
        connection.close()


def reason_of(path: str, status: int, body: bytes) -> str:
    """The words of a refusal of services/api/endpoints/health.py."""
    try:
        told: Any = json.loads(body)
        return f"{told['status']}: {told['reason']}"
    except (ValueError, KeyError, TypeError):
        return f"{path} answers {status}"
