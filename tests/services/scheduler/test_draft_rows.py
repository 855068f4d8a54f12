"""Whether drafts pay is learned from the times of steps with and without, per class of batch sizes."""

from itertools import pairwise

from services.scheduler.draft_rows import DWELL, FEWEST, FIRST_TRIAL, LAST_TRIAL, MARGIN, WINDOW, Switch


def run(
    switch: Switch, steps: int, rows: int, plain_s: float, drafted_s: float, length: float = 2.0, start: int = 0
) -> list[bool]:
    """So many steps of these times; a step with drafts gives `length` tokens per row. Which steps had drafts."""
    ways = []
    for step in range(start, start + steps):
        drafts = switch.wants(rows)
        ways.append(drafts)
        # an interruption now and then must not count
        slow = 50.0 if step % 100 == 37 else 1.0
        switch.note(drafts, rows, (drafted_s if drafts else plain_s) * slow, int(length * rows) if drafts else rows)
    return ways


def trials(ways: list[bool], usual: bool) -> list[int]:
    """How many steps each stay in the other way lasted."""
    stays, count = [], 0
    for way in [*ways, usual]:
        if way is not usual:
            count += 1
        elif count:
            stays.append(count)
            count = 0
    return stays


def test_drafts_that_pay_stay_and_are_checked_ever_more_rarely() -> None:
    ways = run(Switch(64), 5000, 4, plain_s=1.0, drafted_s=1.3)
    stays = trials(ways, usual=True)
    assert ways[:WINDOW] == [True] * WINDOW and set(stays) == {FEWEST}
    assert 3 <= len(stays) <= 6, "each trial for nothing doubles the interval"


def test_drafts_that_do_not_pay_are_given_up_after_the_first_comparison() -> None:
    ways = run(Switch(64), 3000, 4, plain_s=1.0, drafted_s=2.5)
    assert not any(ways[WINDOW + FEWEST : WINDOW + FIRST_TRIAL])
    assert ways.count(True) < WINDOW + 6 * FEWEST


def test_they_come_back_when_they_pay_again() -> None:
    switch = Switch(64)
    run(switch, 600, 4, plain_s=1.0, drafted_s=2.5)
    ways = run(switch, LAST_TRIAL, 4, plain_s=1.0, drafted_s=1.2)
    assert all(ways[-50:])


def test_a_small_difference_changes_nothing() -> None:
    """Within the margin the way that is in use stays, whichever it is."""
    ways = run(Switch(64), 3000, 4, plain_s=1.0, drafted_s=2.0 * (1 + (MARGIN - 1) / 2))
    assert set(trials(ways, usual=True)) == {FEWEST}
    switch = Switch(64)
    run(switch, 600, 4, plain_s=1.0, drafted_s=3.0)
    ways = run(switch, 3000, 4, plain_s=1.0, drafted_s=2.0 / (1 + (MARGIN - 1) / 2))
    assert set(trials(ways, usual=False)) == {FEWEST}


def test_classes_of_sizes_are_judged_each_by_itself() -> None:
    switch = Switch(64)
    small = run(switch, 100, 3, 1.0, 1.2)
    large = run(switch, 100, 20, 1.0, 3.0)
    assert small[-20:] == [True] * 20 and large[-20:] == [False] * 20
    assert run(switch, DWELL + 1, 2, 1.0, 1.2)[-1] and not run(switch, DWELL + 1, 17, 1.0, 3.0)[-1]


def test_too_many_rows_have_no_drafts_until_they_are_clearly_fewer() -> None:
    switch = Switch(16)
    assert switch.wants(16) and not switch.wants(17)
    run(switch, DWELL, 17, 1.0, 1.0)
    assert not switch.wants(13) and switch.wants(12) and switch.wants(16)


def test_batches_at_the_border_of_two_classes_do_not_go_to_and_fro() -> None:
    switch = Switch(64)
    for _ in range(5):
        run(switch, 100, 3, 1.0, 1.2)
        run(switch, 100, 4, 1.0, 3.0)
    assert not switch.wants(4)
    ways = [way for step in range(400) for way in run(switch, 1, 3 + step % 2, 1.0, 3.0 if step % 2 else 1.2)]
    changes = sum(before is not after for before, after in pairwise(ways))
    assert changes <= 400 / DWELL + 1
