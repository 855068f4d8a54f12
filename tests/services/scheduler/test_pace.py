from collections import deque

import pytest

from services.scheduler.pace import CEILING_S, FACTOR, FIRST_S, FIRST_STEPS, FLOOR_S, Pace, quantile


def learned(step_s: float, steps: int = 100, rows: int = 8, tokens: int = 0) -> tuple[Pace, float]:
    """A pace after so many equal steps, each sent while the one before ran; and the time."""
    pace, now_s = Pace(0.0), 50.0
    for _ in range(steps):
        sent_s, now_s = now_s - step_s, now_s + step_s
        pace.finished(sent_s, rows, tokens, now_s)
    return pace, now_s


def test_a_step_counts_from_the_result_before_it_or_from_its_sending() -> None:
    pace = Pace(0.0)
    pace.finished(sent_s=10.0, rows=1, tokens=0, now_s=10.5)  # the worker was idle
    assert pace.usual_s(0) == 0.5
    pace.finished(sent_s=10.1, rows=1, tokens=0, now_s=12.5)  # it waited for the first
    assert sorted(pace._decode_s) == [0.5, 2.0]
    pace.finished(sent_s=99.0, rows=1, tokens=0, now_s=99.25)
    assert pace._decode_s[-1] == 0.25


def test_the_deadline_follows_measured_times_between_floor_and_ceiling() -> None:
    assert learned(0.01)[0].allowed_s(8, 0) == FLOOR_S
    assert learned(2.0)[0].allowed_s(8, 0) == pytest.approx(FACTOR * 2.0)
    assert learned(100.0)[0].allowed_s(8, 0) == CEILING_S
    assert learned(1000.0)[0].allowed_s(8, 0) == pytest.approx(3000.0)  # slower than any ceiling: its own measure


def test_a_prefill_is_judged_by_its_tokens() -> None:
    pace, _ = learned(4.0, rows=0, tokens=2000)
    assert pace.usual_s(2000) == pytest.approx(4.0)
    assert pace.usual_s(1000) == pytest.approx(2.0)
    assert pace.allowed_s(0, 1000) == pytest.approx(FACTOR * 2.0)


def test_a_prompt_of_few_tokens_does_not_make_long_ones_look_slow() -> None:
    pace, _ = learned(0.02, rows=0, tokens=1)
    assert pace.usual_s(2048) < 2.0


def test_a_rare_slow_step_changes_little() -> None:
    pace, now_s = learned(0.5)
    for step in range(2):
        pace.finished(now_s, 8, 0, now_s + 100)
        now_s += 100 + step
    assert pace.usual_s(0) == pytest.approx(0.5)


def test_first_steps_and_new_sizes_get_more_time() -> None:
    assert Pace(0.0).allowed_s(1, 0) == FIRST_S
    assert learned(0.01, steps=FIRST_STEPS - 1)[0].allowed_s(8, 0) == FIRST_S
    pace, _ = learned(0.01)
    assert pace.allowed_s(8, 0) == FLOOR_S
    assert pace.allowed_s(9, 0) == FIRST_S
    assert pace.allowed_s(8, 1) == FIRST_S


def test_overdue_tells_why() -> None:
    pace, now_s = learned(2.0)
    assert pace.overdue(now_s - 2.0, 8, 0, now_s + 39.0) == ""
    assert pace.overdue(now_s - 2.0, 8, 0, now_s + 41.0) == (
        "no result for 41.0 s, 40.0 s are allowed for 8 rows and 0 tokens"
    )
    # A plan that was sent to an idle worker counts from then on.
    assert pace.overdue(now_s + 30.0, 8, 0, now_s + 41.0) == ""


def test_a_deadline_of_the_settings_counts_from_the_first_step() -> None:
    pace = Pace(1.5)
    assert pace.allowed_s(1, 5000) == 1.5
    assert pace.overdue(10.0, 1, 0, 11.5) == "" != pace.overdue(10.0, 1, 0, 11.6)


def test_old_times_are_forgotten() -> None:
    pace, now_s = learned(10.0)
    for _ in range(300):
        pace.finished(now_s, 8, 0, now_s + 0.01)
        now_s += 0.01
    assert pace.usual_s(0) == pytest.approx(0.01)


def test_the_quantile_of_nothing_is_nothing() -> None:
    assert quantile(deque()) == 0.0
    assert quantile(deque([3.0])) == 3.0
    assert quantile(deque(float(value) for value in range(101))) == 95.0
