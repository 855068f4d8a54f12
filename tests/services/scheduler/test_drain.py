"""The estimate of the wait."""

from services.scheduler.drain import DrainRate


def test_nothing_known_is_no_wait() -> None:
    rate = DrainRate()
    assert rate.wait_s(1000) == 0
    rate.look(0.0, 0, 500)
    assert rate.wait_s(1000) == 0


def test_the_wait_is_what_waits_by_what_leaves() -> None:
    rate = DrainRate()
    rate.look(0.0, 0, 500)
    rate.look(1.0, 100, 400)
    assert rate.wait_s(400) == 4.0


def test_an_empty_queue_says_nothing_about_the_speed() -> None:
    rate = DrainRate()
    rate.look(0.0, 0, 500)
    rate.look(1.0, 100, 0)
    rate.look(100.0, 101, 50)
    assert rate.wait_s(100) == 1.0


def test_newer_figures_count_more_and_a_standstill_is_noticed() -> None:
    rate = DrainRate()
    rate.look(0.0, 0, 500)
    rate.look(1.0, 100, 500)
    for second in range(2, 62):
        rate.look(float(second), 100, 500)
    assert rate.wait_s(100) > 100
