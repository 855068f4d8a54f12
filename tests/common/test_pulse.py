from common.metrics import checked
from common.pulse import Pulse, Pulses, Rhythm, standstill


def test_work_that_waits_while_none_is_done_adds_up() -> None:
    pulse = Pulse(most_s=3.0)
    assert pulse.look(100.0, (0, 0)) == 0
    assert [pulse.look(100.0 + at_s, (2, 0)) for at_s in (1, 2, 3)] == [1, 2, 3]
    assert pulse.look(104.0, (2, 1)) == 0  # one is done, another waits
    assert pulse.look(105.0, (2, 1)) == 1


def test_nothing_to_do_is_no_standstill() -> None:
    pulse = Pulse(most_s=3.0)
    assert [pulse.look(at_s, (0, 7)) for at_s in (1.0, 2.0, 50.0)] == [0, 0, 0]
    # Work that has just come has waited no longer than since the look before.
    assert pulse.look(51.0, (1, 7)) == 1


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    pulse = Pulse(most_s=3.0)
    pulse.look(10.0, (1, 5))
    assert pulse.look(11.0, (1, 5)) == 1
    assert pulse.look(3611.0, (1, 5)) == 4  # an hour asleep
    assert pulse.look(3612.0, (1, 6)) == 0


def test_the_first_look_blames_nobody() -> None:
    assert Pulse(most_s=3.0).look(1e9, (4, 0)) == 0


def test_the_kind_that_stands_still_longest_counts() -> None:
    pulses, busy, stuck = Pulses(most_s=3.0), [1, 0], [1, 0]
    pulses.add(lambda: (busy[0], busy[1]))
    pulses.add(lambda: (stuck[0], stuck[1]))
    for at_s in range(5):
        busy[1] += 1
        figures = checked(pulses.figures(float(at_s)))
    assert figures == {"work_owed": 2.0, "stalled_seconds": 4.0} == pulses.last
    assert standstill(figures, after_s=3.0) == "nothing done for 4 s, 2 waiting"
    assert standstill(figures, after_s=4.0) == ""
    assert standstill({}, after_s=4.0) == ""  # an older process does not tell


def test_without_work_all_is_well() -> None:
    assert Pulses(most_s=3.0).figures(5.0) == {"work_owed": 0.0, "stalled_seconds": 0.0}


def test_a_judge_that_was_stopped_waits_one_more_round() -> None:
    rhythm = Rhythm(most_s=3.0)
    assert [rhythm.steady(at_s) for at_s in (100.0, 101.0, 104.0, 110.0, 111.0)] == [False, True, True, False, True]
