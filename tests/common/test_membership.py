from typing import Any

import msgspec

from common.membership import Membership, by_scheduler
from common.protocol import Load, Member, Members, ModelFacts, Peer


def member(service: str, instance: int, incarnation: int, state: str = "ready") -> Member:
    return Member(Peer(service, instance, incarnation, f"ipc://x{incarnation}"), state)


def test_changes_are_told_once() -> None:
    view = Membership()
    first = view.update(7, Members([member("api", 0, 1), member("worker", 0, 2)], [], Load()), 1.0)
    assert ([p.incarnation for p in first.joined], first.left, first.new_scheduler) == ([1, 2], [], True)
    again = view.update(7, Members([member("api", 0, 1), member("worker", 0, 2)], [], Load()), 2.0)
    assert again == ([], [], False, 0)
    replaced = view.update(7, Members([member("api", 0, 3), member("worker", 0, 2)], [1], Load()), 3.0)
    assert ([p.incarnation for p in replaced.joined], [p.incarnation for p in replaced.left]) == ([3], [1])
    assert view.departed == {1}
    assert view.heard_s == 3.0


def test_another_scheduler_is_noticed() -> None:
    view = Membership()
    view.update(7, Members([], [], Load()), 1.0)
    assert view.update(8, Members([], [], Load()), 2.0).new_scheduler
    assert view.scheduler == 8


def counting(service: str, incarnation: int, requests: float) -> Member:
    return msgspec.structs.replace(member(service, 0, incarnation), counters={"requests": requests})


def test_what_a_dead_scheduler_had_counted_is_kept_and_handed_on() -> None:
    view = Membership(dead_after_s=5.0)
    view.update(7, Members([counting("scheduler", 7, 9.0), counting("api", 1, 2.0)], [], Load()), 1.0)
    view.update(8, Members([counting("scheduler", 8, 1.0), counting("api", 1, 2.0)], [], Load()), 2.0)
    view.update(8, Members([counting("scheduler", 8, 1.0), counting("api", 1, 2.0)], [], Load()), 9.0)
    found = {each.service: each.counters["requests"] for each in view.standings()}
    assert found == {"scheduler": 10.0, "api": 2.0}
    assert view.ledger["scheduler-0"].gone == (7,) and "api-0" not in view.ledger


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
    view = Membership(own=1, dead_after_s=5.0)
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
    view = Membership(own=1, dead_after_s=5.0)
    view.update(7, Members([member("tokenizer", 0, 2)], [], Load()), 1.0)
    assert view.update(8, Members([], [], Load()), 2.0).left == []
    assert view.update(8, Members([], [], Load()), 6.9).left == []
    assert [peer.incarnation for peer in view.update(8, Members([], [], Load()), 7.0).left] == [2]


MODEL = ModelFacts("m", "llama", 100, 64, (2,), 16, 8)


def says(scheduler: int, *members: Member, departed: tuple[int, ...] = (), **more: Any) -> tuple[int, Members]:
    """What scheduler i, of incarnation 100 + i (200 + i for its successor), tells."""
    own = member("scheduler", scheduler % 100, scheduler, more.pop("state", "ready"))
    return scheduler, Members([own, *members], list(departed), more.pop("load", Load()), **more)


API, TOKENIZER = member("api", 0, 1), member("tokenizer", 0, 2)


def both() -> Membership:
    """The API's view of two schedulers."""
    view = Membership(own=1, dead_after_s=5.0)
    for scheduler in (100, 101):
        view.update(*says(scheduler, API, TOKENIZER, model=MODEL), 1.0)
    return view


def test_each_scheduler_is_a_view_and_their_union_has_everybody_once() -> None:
    view = both()
    assert sorted(view.members) == [1, 2, 100, 101] and sorted(view.views) == [0, 1]
    change = view.update(*says(101, API, TOKENIZER, member("worker", 1, 3), model=MODEL), 2.0)
    assert [peer.incarnation for peer in change.joined] == [3] and change.scheduler == 1 and not change.new_scheduler
    assert [view.instance_of(incarnation) for incarnation in (100, 101, 7)] == [0, 1, None]


def test_a_scheduler_that_is_lost_takes_only_itself_and_its_workers() -> None:
    view = both()
    view.update(*says(100, API, TOKENIZER, member("worker", 0, 3)), 2.0)
    for now_s in (3.0, 6.9):
        assert view.update(*says(101, API, TOKENIZER), now_s).left == []
    change = view.update(*says(101, API, TOKENIZER), 7.1)
    assert sorted(peer.incarnation for peer in change.left) == [3, 100]
    assert view.lost(0, 7.1) and not view.lost(1, 7.1) and view.lost(2, 7.1)
    assert [peer.instance for peer in view.ready("tokenizer")] == [0]


def test_a_peer_has_gone_when_all_that_speak_have_lost_it() -> None:
    view = both()
    assert view.update(*says(100, API, departed=(2,)), 2.0).left == []
    assert not view.departed, "the other one still has it"
    assert [peer.incarnation for peer in view.update(*says(101, API, departed=(2,)), 2.1).left] == [2]
    assert view.departed == {2}
    view = both()
    view.update(*says(101, API, departed=(2,)), 2.0)
    assert [p.incarnation for p in view.update(*says(101, API, departed=(2,)), 6.5).left] == [100, 2], "0 is silent"


def test_a_peer_that_was_replaced_has_gone_at_once() -> None:
    view = both()
    change = view.update(*says(101, API, member("tokenizer", 0, 9), departed=(2,)), 2.0)
    assert [peer.incarnation for peer in change.left] == [2] and [peer.incarnation for peer in change.joined] == [9]
    assert view.departed == {2}
    assert view.update(*says(100, API, TOKENIZER), 2.1) == ([], [], False, 0), "old word of it does not bring it back"


def test_a_restarted_scheduler_disturbs_nobody() -> None:
    view = both()
    change = view.update(*says(200), 2.0)
    assert change.new_scheduler and [peer.incarnation for peer in change.left] == [100]
    change = view.update(*says(200, API, member("tokenizer", 0, 2, "starting")), 2.1)
    assert change.left == [] and [peer.instance for peer in view.ready("tokenizer")] == [0], "it is ready for the other"
    assert view.update(*says(100, API), 2.2) == ([], [], False, 0) and view.instance_of(100) is None


def test_we_are_given_up_when_all_that_speak_say_so() -> None:
    view = both()
    view.update(*says(100, TOKENIZER, departed=(1,)), 2.0)
    assert 1 not in view.departed and not view.lists_us(0) and view.lists_us(1)
    view.update(*says(101, TOKENIZER, departed=(1,)), 2.1)
    assert 1 in view.departed


def test_who_takes_work() -> None:
    view = both()

    def takers(now_s: float) -> list[int]:
        return [each for each in (0, 1, 2) if view.takes_work(each, now_s, 1.0)]

    assert takers(2.0) == [0, 1] and takers(4.0) == []
    view.update(*says(100, API, model=MODEL, state="draining"), 2.0)
    assert takers(2.0) == [1]
    view.update(*says(100, API), 2.1)
    assert takers(2.1) == [1] and not view.starved(0, 2.1) and view.starved(0, 8.0), "it has no worker"
    view.update(*says(100, TOKENIZER, model=MODEL), 2.2)
    assert takers(2.2) == [1], "it does not know us"


def test_all_schedulers_serve_one_model() -> None:
    view = both()
    view.update(*says(101, API, model=msgspec.structs.replace(MODEL, max_model_len=32, num_blocks=4)), 2.0)
    assert view.model is not None and view.model.max_model_len == 32 and not view.foreign
    view.update(*says(101, API, model=msgspec.structs.replace(MODEL, vocab_size=99)), 2.1)
    assert view.model == MODEL and view.foreign == {1} and not view.takes_work(1, 2.1, 1.0)
    view.update(*says(200, API), 2.2)
    assert view.model is None and view.foreign == {1}, "the first one's workers are away, its model stands"
    view.update(*says(101, API, model=msgspec.structs.replace(MODEL, vocab_size=99)), 8.0)
    assert view.model is not None and view.model.vocab_size == 99 and not view.foreign, "the first one is lost"


def test_a_scheduler_beyond_all_numbers_is_none() -> None:
    view = both()
    stranger = Members([member("scheduler", 64, 77), member("api", 5, 55)], [1, 2, 100], Load(), MODEL)
    assert view.update(77, stranger, 2.0) == ([], [], False, 64)
    assert view.instance_of(77) is None and sorted(view.members) == [1, 2, 100, 101] and not view.departed


def test_loads_add_up_and_the_highest_number_of_schedulers_counts() -> None:
    view = both()
    view.update(*says(100, API, load=Load(running=2, blocks_total=10), schedulers=2), 2.0)
    view.update(*says(101, API, load=Load(running=3, blocks_total=5), schedulers=3), 2.0)
    assert view.load == Load(running=5, blocks_total=15) and view.count == 3
    view.update(*says(101, API, schedulers=10**9), 2.0)
    assert view.count == 64
    view.update(*says(101, API, schedulers=1), 2.0)
    assert view.count == 2


def test_only_a_scheduler_that_lists_itself_says_who_lives() -> None:
    message = Members([member("scheduler", 0, 8), member("api", 0, 1)], [], Load())
    assert by_scheduler(8, message)
    assert not by_scheduler(1, message)
    assert not by_scheduler(9, message)
