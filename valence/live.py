"""Whether one process is live, for the health checks of containers: `valence status --live worker-0`. Pure.

Says what `valence serve` would act on (watch.py), from one answer of the scheduler and without memory; so a check must
allow for the time in which a process starts (a start-up probe).
"""

from common.config import Links
from common.protocol import Status
from common.pulse import standstill
from valence.errors import CommandError
from valence.programs import SERVICES, Program
from valence.watch import REPLACED_WHEN_STALLED


def named(name: str) -> Program:
    """Raises CommandError for what is no name of a process."""
    service, _, instance = name.rpartition("-")
    if service not in SERVICES or not instance.isdecimal():
        raise CommandError(f"no process {name!r}; names are like {', '.join(f'{each}-0' for each in SERVICES)}")
    return Program(service, int(instance))


def trouble(program: Program, status: Status | None, links: Links) -> str:
    """Why the process should be started anew; empty if it is live, or nobody can tell."""
    if status is None:
        return "it does not answer" if program.service == "scheduler" else ""
    for member in status.members:
        if Program(member.peer.service, member.peer.instance) == program:
            stalls = program.service in REPLACED_WHEN_STALLED and member.state == "ready"
            return standstill(member.counters, links.stalled_after_s) if stalls else ""
    return "the scheduler does not list it"
