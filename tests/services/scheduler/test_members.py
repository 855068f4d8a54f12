import pytest

from common.protocol import Heartbeat, Hello, Load, Peer
from services.scheduler.members import Registry, without_figures

ROOT = "ipc:///run/"


def peer(service: str, instance: int, incarnation: int, endpoint: str = ROOT + "x") -> Peer:
    return Peer(service, instance, incarnation, endpoint)


@pytest.fixture
def registry() -> Registry:
    return Registry(peer("scheduler", 0, 1), (ROOT,), dead_after_s=5)


def hello(registry: Registry, joining: Peer, now_s: float = 0.0, sender: int | None = None):
    return registry.hello(joining.incarnation if sender is None else sender, Hello(joining, "hash"), now_s)


def test_a_hello_joins_and_a_repeat_changes_nothing(registry: Registry) -> None:
    api = peer("api", 0, 11)
    assert hello(registry, api) == (api, None)
    assert hello(registry, api) == (None, None)
    assert registry.service_of(11) == "api"
    assert registry.find("api", 0) == api


def test_what_has_departed_is_in_the_ledger_which_a_successor_is_told(registry: Registry) -> None:
    api = peer("api", 0, 11)
    hello(registry, api)
    registry.heartbeat(11, Heartbeat("ready", 1, None, {"requests": 4.0}), 1.0)
    hello(registry, peer("api", 0, 12))
    registry.heartbeat(12, Heartbeat("ready", 1, None, {"requests": 1.0}), 1.0)
    told = registry.message(Load(), None)
    assert told.ledger["api-0"].counters == {"requests": 4.0} and told.ledger["api-0"].gone == (11,)
    assert [m.counters for m in without_figures(told).members] == [{}, {}] and not without_figures(told).ledger
    successor = Registry(peer("scheduler", 0, 2), (ROOT,), dead_after_s=5)
    successor.hello(12, Hello(peer("api", 0, 12), "hash", ledger=told.ledger), 2.0)
    successor.heartbeat(12, Heartbeat("ready", 1, None, {"requests": 2.0}), 2.0)
    successor.remove(12)
    assert successor.ledger["api-0"].counters == {"requests": 6.0}


def test_a_new_incarnation_replaces_the_old_which_never_comes_back(registry: Registry) -> None:
    old, new = peer("api", 0, 11), peer("api", 0, 12)
    hello(registry, old)
    assert hello(registry, new) == (new, old)
    assert registry.departed == {11}
    assert hello(registry, old) == (None, None)
    assert registry.find("api", 0) == new


@pytest.mark.parametrize(
    ("joining", "sender"),
    [
        (peer("api", 0, 11), 12),
        (peer("api", 0, 11, "ipc:///etc/passwd"), 11),
        (peer("api", 0, 11, ROOT + "../x"), 11),
        (peer("api", 0, 11, "tcp://10.0.0.1:80"), 11),
        (peer("scheduler", 0, 11), 11),
        (peer("api", 256, 11), 11),
        (peer("api", -1, 11), 11),
    ],
)
def test_a_false_hello_is_not_accepted(registry: Registry, joining: Peer, sender: int) -> None:
    assert hello(registry, joining, sender=sender) == (None, None)
    assert len(registry.members()) == 1


def test_heartbeats_update_known_members_only(registry: Registry) -> None:
    hello(registry, peer("api", 0, 11))
    assert registry.heartbeat(11, Heartbeat("ready", 7), 1.0)
    assert not registry.heartbeat(11, Heartbeat("ready", 8), 2.0)
    assert not registry.heartbeat(99, Heartbeat("ready", 8), 2.0)
    assert not registry.heartbeat(1, Heartbeat("failed", 8), 2.0)
    assert [(m.state, m.progress) for m in registry.members()] == [("ready", 0), ("ready", 8)]


def test_silent_members_are_found_and_removed(registry: Registry) -> None:
    hello(registry, peer("worker", 0, 11), now_s=0.0)
    registry.judge(11, "ready")
    hello(registry, peer("api", 0, 12), now_s=0.0)
    registry.heartbeat(12, Heartbeat("ready", 1), 4.0)
    assert registry.silent(5.0) == []
    assert [p.incarnation for p in registry.silent(5.1)] == [11]
    registry.remove(11)
    assert registry.silent(6.0) == []
    message = registry.message(Load(), None)
    assert message.departed == [11]
    assert [m.peer.incarnation for m in message.members] == [1, 12]


def test_who_starts_may_be_silent_for_longer(registry: Registry) -> None:
    """A worker that loads a library from a cold disk does not beat meanwhile."""
    hello(registry, peer("worker", 0, 11), now_s=0.0)
    registry.heartbeat(11, Heartbeat("starting", 1), 1.0)
    for now_s in range(2, 62, 2):
        assert registry.silent(float(now_s)) == []
    assert [p.incarnation for p in registry.silent(61.1)] == [11]
    registry.heartbeat(11, Heartbeat("ready", 2), 62.0)
    registry.judge(11, "ready")
    assert registry.silent(63.0) == registry.silent(65.0) == registry.silent(67.0) == []
    assert [p.incarnation for p in registry.silent(67.1)] == [11]


def test_after_a_gap_between_beats_nobody_is_judged() -> None:
    registry = Registry(peer("scheduler", 0, 1), ("ipc:///run/",), 5.0, beat_gap_s=3.0)
    assert [registry.rhythm.steady(at_s) for at_s in (100.0, 100.5, 130.0, 130.5)] == [False, True, False, True]


def test_the_scheduler_itself_cannot_be_removed(registry: Registry) -> None:
    assert registry.remove(1) is None
    assert registry.service_of(1) == "scheduler"


def test_a_worker_is_ready_when_the_scheduler_plans_for_it(registry: Registry) -> None:
    hello(registry, peer("worker", 0, 11))
    assert not registry.heartbeat(11, Heartbeat("ready", 7), 1.0)
    assert registry.members()[1].state == "starting" and registry.members()[1].progress == 7
    assert registry.judge(11, "failed") and not registry.judge(11, "failed")
    assert not registry.heartbeat(11, Heartbeat("ready", 8), 2.0)
    assert registry.members()[1].state == "failed"
    assert registry.judge(11, "ready")
    assert registry.members()[1].state == "ready"
    assert registry.heartbeat(11, Heartbeat("draining", 9), 3.0)
    registry.remove(11)
    assert not registry.judge(11, "ready")
    assert (registry.name(1), registry.name(11)) == ("scheduler-0", "b")


def test_a_groups_figures_are_shown_with_its_worker(registry: Registry) -> None:
    hello(registry, peer("worker", 0, 11))
    registry.heartbeat(11, Heartbeat("ready", 7, counters={"steps": 3.0}), 1.0)
    registry.tell_figures(11, {"group_running": 2.0})
    registry.tell_figures(12, {"group_running": 9.0})
    assert [member.counters for member in registry.members()] == [{}, {"steps": 3.0, "group_running": 2.0}]
    registry.remove(11)
    hello(registry, peer("worker", 0, 13))
    assert registry.members()[1].counters == {}


def test_the_schedulers_own_sleep_is_nobodys_silence(registry: Registry) -> None:
    """Suspended together, they go on one after the other: all have `dead_after_s` anew."""
    hello(registry, peer("worker", 0, 11), now_s=0.0)
    registry.judge(11, "ready")
    hello(registry, peer("api", 0, 12), now_s=0.0)
    assert registry.silent(0.5) == []
    assert registry.silent(60.0) == []
    registry.heartbeat(12, Heartbeat("ready", 1), 61.0)
    for now_s in (60.5, 62.0, 64.0, 65.0):
        assert registry.silent(now_s) == []
    assert [p.incarnation for p in registry.silent(65.1)] == [11]
