"""What runs and how it is doing: the schedulers' `Status` joined with the supervisor's view of the processes.

The supervisor knows which processes exist, also those that are down; the schedulers know how far each one is.
"""

import time
from types import TracebackType
from typing import Any, NamedTuple

from common.config import Config, Links
from common.membership import MOST_SCHEDULERS, Membership
from common.protocol import Member, Members, Peer, Schedulers, Status, StatusQuery, Story, StoryQuery, ToAdmin
from common.pulse import standstill
from common.transport import Inbox, LinkCounters, Push, new_incarnation, scheduler_endpoint, secure
from valence.programs import SERVICES
from valence.supervisor import ProcessView

QUEUE = 64
ANSWER_S = 2.0
OTHERS_S = 0.3  # after the first answer; the others were asked at the same time
STARTING_S = 60.0  # from a process's start until it joins; longer only where programs load slowly
LINKS = Links()


class StatusClient:
    """Asks the schedulers of a run for their `Status`; use as a context manager. It follows their number."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._counters = LinkCounters()
        self._incarnation = new_incarnation()
        links = config.links
        secure(links)
        own = f"ipc://{config.run_dir}/admin.{self._incarnation:x}"
        if links.transport == "tcp":
            own = f"tcp://{links.host}:0"
        self._inbox: Inbox[ToAdmin] = Inbox(own, ToAdmin, QUEUE, self._counters)
        self._schedulers: list[Push] = []
        self.follow(config.services.scheduler.replicas)

    def __enter__(self) -> "StatusClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        for push in self._schedulers:
            push.close()
        self._inbox.close()

    def follow(self, count: int) -> None:
        """There may be so many schedulers."""
        while len(self._schedulers) < count:
            endpoint = scheduler_endpoint(self._config, len(self._schedulers))
            self._schedulers.append(Push(endpoint, self._incarnation, QUEUE, self._counters))

    def ask(self, wait_s: float = ANSWER_S) -> Status | None:
        """The answers of all schedulers as one; None if none comes in time."""
        return united(self.ask_each(wait_s))

    def ask_each(self, wait_s: float = ANSWER_S) -> dict[int, Status]:
        """The schedulers' answers by instance, the newest if older ones were under way.

        Waits `wait_s` for the first, and not much longer for others.
        """
        for push in self._schedulers:
            push.send(StatusQuery(self._inbox.endpoint))
        found: dict[int, Status] = {}
        end_s = time.monotonic() + wait_s
        while len(found) < len(self._schedulers) and self._inbox.wait(max(end_s - time.monotonic(), 0.0)):
            for sender, message in self._inbox.drain():
                if isinstance(message, Status):
                    found[instance_of(sender, message)] = message
                    self.follow(min(message.schedulers, MOST_SCHEDULERS))
            end_s = min(end_s, time.monotonic() + OTHERS_S)
        return found

    def story(self, seq_id: int, wait_s: float = ANSWER_S) -> list[str]:
        """What the schedulers remember of a sequence, its number first; empty if nothing or without an answer."""
        for push in self._schedulers:
            push.send(StoryQuery(self._inbox.endpoint, seq_id))
        answers, end_s = 0, time.monotonic() + wait_s
        while answers < len(self._schedulers) and self._inbox.wait(max(end_s - time.monotonic(), 0.0)):
            for _, message in self._inbox.drain():
                if isinstance(message, Story):
                    answers += 1
                    if message.lines:
                        return message.lines
            end_s = min(end_s, time.monotonic() + OTHERS_S)
        return []

    def set_schedulers(self, count: int) -> None:
        """Tells all schedulers how many there shall be. `Status` shows who has heard it."""
        self.follow(count)
        for push in self._schedulers:
            push.send(Schedulers(count))


def instance_of(sender: int, status: Status) -> int:
    """Which scheduler answered: it lists itself."""
    return next((m.peer.instance for m in status.members if m.peer.incarnation == sender), 0)


def united(answers: dict[int, Status]) -> Status | None:
    """What several schedulers say, as one."""
    view = Membership()
    for instance, each in answers.items():
        own = (m.peer for m in each.members if (m.peer.service, m.peer.instance) == ("scheduler", instance))
        sender = next(own, Peer("scheduler", instance, 1, "")).incarnation
        view.update(sender, Members(each.members, [], each.load, each.model, each.schedulers), 0.0)
    return Status(list(view.members.values()), view.load, view.model, view.count) if answers else None


class Row(NamedTuple):
    """One line of the table."""

    service: str
    instance: int
    pid: int | None  # None: not running
    state: str  # the member's state, or the supervisor's word for a process that is down
    since: float  # Unix time
    reason: str = ""  # why it is not well


def join(views: list[ProcessView], status: Status | None, links: Links = LINKS, now_s: float = 0.0) -> list[Row]:
    """One row per process. `now_s` is Unix time.

    A process that is up but not a member (yet) is "starting", for a minute; one that does nothing while work waits is
    "stalled".
    """
    members: dict[tuple[str, int], Member] = (
        {(m.peer.service, m.peer.instance): m for m in status.members} if status else {}
    )
    rows = []
    for view in views:
        service, instance = view.program
        member = members.pop((service, instance), None)
        if view.pid and member and member.peer.pid == view.pid:
            rows.append(_member_row(member, links))
        elif view.state in ("starting", "running"):
            reason = "" if status else "the scheduler does not answer"
            silent = status is not None and now_s - view.since_s > STARTING_S
            if silent:
                reason = "the scheduler does not list it"
            rows.append(Row(service, instance, view.pid, "silent" if silent else "starting", view.since_s, reason))
        else:
            rows.append(Row(service, instance, view.pid or None, view.state, view.since_s))
    return sorted(rows + [_member_row(member, links) for member in members.values()])


def _member_row(member: Member, links: Links) -> Row:
    peer, reason = member.peer, standstill(member.counters, links.stalled_after_s)
    state = "stalled" if reason else member.state
    return Row(peer.service, peer.instance, peer.pid or None, state, round(peer.since_s, 3), reason)


def is_ready(rows: list[Row], status: Status | None) -> bool:
    """A model is loaded and each service has a process that takes work."""
    if status is None or status.model is None:
        return False
    return {row.service for row in rows if row.state == "ready"} >= set(SERVICES)


def all_ready(views: list[ProcessView], status: Status | None) -> bool:
    """The same, and no process is missing."""
    rows = join(views, status)
    return is_ready(rows, status) and all(row.state == "ready" for row in rows)


def document(
    views: list[ProcessView], answers: dict[int, Status], links: Links = LINKS, now_s: float = 0.0
) -> dict[str, Any]:
    """What `valence status --json` prints."""
    status = united(answers)
    load = status.load if status else None
    rows = join(views, status, links, now_s)
    return {
        "model": status.model.name if status and status.model else None,
        "ready": is_ready(rows, status),
        "processes": [row._asdict() for row in rows],
        "schedulers": [
            {"instance": instance, "running": each.load.running, "waiting": each.load.waiting}
            for instance, each in sorted(answers.items())
        ],
        "requests": {"running": load.running if load else 0, "waiting": load.waiting if load else 0},
        "kv": {
            "blocks_total": load.blocks_total if load else 0,
            "blocks_free": load.blocks_free if load else 0,
            "blocks_cached": load.blocks_cached if load else 0,
        },
        "drafts": drafts(status),
    }


def drafts(status: Status | None) -> dict[str, float]:
    """Of speculative decoding: drafts verified, those that held, and tokens that a row yields in a step with drafts."""
    counters = [m.counters for m in status.members if m.peer.service == "scheduler"] if status else []
    rows, tried, held = (
        sum(each.get(name, 0.0) for each in counters) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return {"tried": tried, "held": held, "mean_length": round(1 + held / rows, 2) if rows else 0.0}
