from common.membership import Membership, by_scheduler
from common.protocol import Load, Member, Members, Peer


def member(service: str, instance: int, incarnation: int, state: str = "ready") -> Member:
    return Member(Peer(service, instance, incarnation, f"ipc://x{incarnation}"), state)


def test_changes_are_told_once() -> None:
    view = Membership()
    first = view.update(7, Members([member("api", 0, 1), member("worker", 0, 2)], [], Load()), 1.0)
    assert ([p.incarnation for p in first.joined], first.left, first.new_scheduler) == ([1, 2], [], True)
    again = view.update(7, Members([member("api", 0, 1), member("worker", 0, 2)], [], Load()), 2.0)
    assert again == ([], [], False)
    replaced = view.update(7, Members([member("api", 0, 3), member("worker", 0, 2)], [1], Load()), 3.0)
    assert ([p.incarnation for p in replaced.joined], [p.incarnation for p in replaced.left]) == ([3], [1])
    assert view.departed == {1}
    assert view.heard_s == 3.0


def test_another_scheduler_is_noticed() -> None:
    view = Membership()
    view.update(7, Members([], [], Load()), 1.0)
    assert view.update(8, Members([], [], Load()), 2.0).new_scheduler
    assert view.scheduler == 8


def test_only_ready_peers_take_work() -> None:
    view = Membership()
    members = [member("tokenizer", 1, 1), member("tokenizer", 0, 2), member("tokenizer", 2, 3, "draining")]
    view.update(7, Members(members, [], Load()), 1.0)
    assert [peer.instance for peer in view.ready("tokenizer")] == [0, 1]


def test_a_scheduler_is_silent_after_missed_beats() -> None:
    view = Membership()
    assert view.silent(0.0, heartbeat_s=1.0)
    view.update(7, Members([], [], Load()), 10.0)
    assert not view.silent(12.0, heartbeat_s=1.0)
    assert view.silent(13.0, heartbeat_s=1.0)


def test_peers_outlast_a_change_of_scheduler() -> None:
    """A new scheduler hears of its members one by one; until then nobody is given up."""
    view = Membership(own=1, grace_s=5.0)
    first = [member("scheduler", 0, 7), member("api", 0, 1), member("tokenizer", 0, 2), member("tokenizer", 1, 3)]
    view.update(7, Members(first, [], Load()), 1.0)
    change = view.update(8, Members([member("scheduler", 0, 8), member("tokenizer", 1, 4)], [], Load()), 2.0)
    assert change.new_scheduler
    assert sorted(peer.incarnation for peer in change.left) == [1, 3, 7]  # ourselves, the replaced, the old scheduler
    assert set(view.members) == {8, 4, 2}
    assert [peer.instance for peer in view.ready("tokenizer")] == [0, 1]
    change = view.update(8, Members([member("scheduler", 0, 8), member("tokenizer", 1, 4)], [2], Load()), 3.0)
    assert [peer.incarnation for peer in change.left] == [2]


def test_the_grace_ends() -> None:
    view = Membership(own=1, grace_s=5.0)
    view.update(7, Members([member("tokenizer", 0, 2)], [], Load()), 1.0)
    assert view.update(8, Members([], [], Load()), 2.0).left == []
    assert view.update(8, Members([], [], Load()), 6.9).left == []
    assert [peer.incarnation for peer in view.update(8, Members([], [], Load()), 7.0).left] == [2]


def test_only_a_scheduler_that_lists_itself_says_who_lives() -> None:
    message = Members([member("scheduler", 0, 8), member("api", 0, 1)], [], Load())
    assert by_scheduler(8, message)
    assert not by_scheduler(1, message)
    assert not by_scheduler(9, message)
