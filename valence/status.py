"""What runs and how it is doing: the scheduler's `Status` joined with the supervisor's view of the processes.

The supervisor knows which processes exist, also those that are down; the scheduler knows how far each one is.
"""

from types import TracebackType
from typing import Any, NamedTuple

from common.config import Config
from common.lifecycle import scheduler_endpoint
from common.protocol import Member, Status, StatusQuery, ToAdmin
from common.transport import Inbox, LinkCounters, Push, new_incarnation, secure
from valence.programs import SERVICES
from valence.supervisor import ProcessView

QUEUE = 64
ANSWER_S = 2.0


class StatusClient:
    """Asks the scheduler of a run for its `Status`; use as a context manager."""

    def __init__(self, config: Config) -> None:
        counters = LinkCounters()
        incarnation = new_incarnation()
        links = config.links
        secure(links)
        own = f"tcp://{links.host}:0" if links.transport == "tcp" else f"ipc://{config.run_dir}/admin.{incarnation:x}"
        self._inbox: Inbox[ToAdmin] = Inbox(own, ToAdmin, QUEUE, counters)
        self._push = Push(scheduler_endpoint(config), incarnation, QUEUE, counters)

    def __enter__(self) -> "StatusClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        self._push.close()
        self._inbox.close()

    def ask(self, wait_s: float = ANSWER_S) -> Status | None:
        """The scheduler's answer, the newest if older ones were under way; None if none comes in time."""
        self._push.send(StatusQuery(self._inbox.endpoint))
        if not self._inbox.wait(wait_s):
            return None
        answers = [message for _, message in self._inbox.drain() if isinstance(message, Status)]
        return answers[-1] if answers else None


class Row(NamedTuple):
    """One line of the table."""

    service: str
    instance: int
    pid: int | None  # None: not running
    state: str  # the member's state, or the supervisor's word for a process that is down
    since: float  # Unix time


def join(views: list[ProcessView], status: Status | None) -> list[Row]:
    """One row per process. A process that is up but not a member (yet) is "starting"."""
    members: dict[tuple[str, int], Member] = (
        {(m.peer.service, m.peer.instance): m for m in status.members} if status else {}
    )
    rows = []
    for view in views:
        service, instance = view.program
        member = members.pop((service, instance), None)
        if view.pid and member and member.peer.pid == view.pid:
            rows.append(_member_row(member))
        else:
            state = "starting" if view.state in ("starting", "running") else view.state
            rows.append(Row(service, instance, view.pid or None, state, view.since_s))
    return sorted(rows + [_member_row(member) for member in members.values()])


def _member_row(member: Member) -> Row:
    peer = member.peer
    return Row(peer.service, peer.instance, peer.pid or None, member.state, round(peer.since_s, 3))


def is_ready(rows: list[Row], status: Status | None) -> bool:
    """A model is loaded and each service has a process that takes work."""
    if status is None or status.model is None:
        return False
    return {row.service for row in rows if row.state == "ready"} >= set(SERVICES)


def all_ready(views: list[ProcessView], status: Status | None) -> bool:
    """The same, and no process is missing."""
    rows = join(views, status)
    return is_ready(rows, status) and all(row.state == "ready" for row in rows)


def document(views: list[ProcessView], status: Status | None) -> dict[str, Any]:
    """What `valence status --json` prints."""
    load = status.load if status else None
    rows = join(views, status)
    return {
        "model": status.model.name if status and status.model else None,
        "ready": is_ready(rows, status),
        "processes": [row._asdict() for row in rows],
        "requests": {"running": load.running if load else 0, "waiting": load.waiting if load else 0},
        "kv": {
            "blocks_total": load.blocks_total if load else 0,
            "blocks_free": load.blocks_free if load else 0,
            "blocks_cached": load.blocks_cached if load else 0,
        },
    }
