from common.columns import pack_i32
from common.protocol import Abort, Admit, Pause, Sampling, Stop
from services.scheduler.early import Early
from services.scheduler.events import ApiLost, TokenizerLost


def admit(seq_id: int, output: bytes = b"", origin: int = -1) -> Admit:
    return Admit(seq_id, pack_i32([5]), Sampling(max_tokens=3), output=output, origin=origin)


def test_all_is_kept_in_order() -> None:
    early = Early(9)
    events = [admit(1), Abort(1), ApiLost(0), TokenizerLost(0), admit(2)]
    assert [early.add(event) for event in events] == [None] * 5
    assert early.events == events


def test_losses_matter_only_to_what_is_kept() -> None:
    early = Early(9)
    early.add(ApiLost(0))
    assert early.events == []


def test_what_befalls_a_kept_request_is_kept_beyond_the_limit_and_once() -> None:
    early = Early(2)
    early.add(Admit(8, pack_i32([5]), Sampling(max_tokens=3), 2))
    early.add(admit(20, origin=4))
    for _ in range(3):
        for event in (Pause(9, True), Pause(4, True), Stop(9), Pause(9, False), Abort(20)):
            assert early.add(event) is None
    assert early.events[2:] == [Stop(9), Abort(20), Pause(4, True), Pause(9, False)]
    assert early.add(Pause(10, True)) is None
    assert len(early.events) == 6


def test_a_repeat_is_one_request_and_what_was_accepted_before_counts() -> None:
    early = Early(9)
    first, again = admit(1), Admit(1, pack_i32([5]), Sampling(max_tokens=3), again=True)
    for event in (first, Abort(7), first, again, first):
        assert early.add(event) is None
    assert early.events == [again, Abort(7)]


def test_beyond_the_limit_only_new_requests_are_refused() -> None:
    early = Early(1)
    early.add(admit(1))
    refusal = early.add(admit(3 << 48 | 2))
    assert refusal is not None and (refusal.tokenizer, refusal.refused.reason) == (3, "overloaded")
    assert early.add(admit(1)) is None  # a repeat
    assert early.add(Abort(2)) is None  # of nobody who is here
    assert early.events == [admit(1)]
    moved = Admit(6, pack_i32([5]), Sampling(max_tokens=3), again=True)
    for accepted in (admit(4, output=pack_i32([7])), admit(5, origin=4), moved):
        assert early.add(accepted) is None
        assert early.events[-1] is accepted
