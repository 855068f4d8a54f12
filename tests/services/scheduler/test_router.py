"""The rule that a cached prefix never overloads a group, and ties."""

from random import Random

from services.scheduler.router import EXPECTED_OUTPUT, Place, choose, cost, expected_output, should_move


def test_the_cost_is_tokens_to_compute() -> None:
    assert cost(Place(uncached=100, pending=20, open=3, missing=7), output=10) == 100 + 20 + 30 + 7


def test_an_idle_system_follows_the_prefix_and_equals_go_to_the_first() -> None:
    assert choose([Place(900, 0, 0), Place(100, 0, 0), Place(500, 0, 0)], 128) == 1
    assert choose([Place(900, 0, 0), Place(900, 0, 0)], 128) == 0
    assert choose([Place(900, 0, 1), Place(900, 0, 0)], 128) == 1


def test_a_prefix_outweighs_no_more_load_than_it_saves() -> None:
    random = Random(3)
    for _ in range(2000):
        known, output = random.randint(1, 4000), random.randint(1, EXPECTED_OUTPUT)
        places = [
            Place(known - random.randint(0, known - 1), random.choice((0, 5, 9000)), random.randint(0, 80))
            for _ in range(random.randint(1, 5))
        ]
        chosen = places[choose(places, output)]
        loads = [place.pending + output * place.open for place in places]
        cached = known - chosen.uncached
        assert chosen.pending + output * chosen.open <= min(loads) + cached


def test_a_hot_prefix_spreads() -> None:
    """All requests share one prefix that only the first group has: the others still get their share."""
    counts = [0, 0, 0]
    for _ in range(300):
        places = [Place(uncached, 0, count) for uncached, count in zip((16, 1040, 1040), counts, strict=True)]
        counts[choose(places, 128)] += 1
    assert counts[0] == max(counts) and max(counts) - min(counts) <= 1024 // 128 + 1


def test_a_group_that_is_too_small_or_has_a_full_queue_comes_last() -> None:
    assert choose([Place(1, 0, 0, short=5), Place(999, 999, 99)], 128) == 1
    assert choose([Place(1, 0, 0, full=True), Place(999, 999, 99)], 128) == 1
    assert choose([Place(1, 0, 0, short=5), Place(999, 999, 99, full=True)], 128) == 1
    assert choose([Place(1, 0, 0, short=5), Place(1, 0, 0, short=4)], 128) == 1
    assert choose([Place(1, 0, 0, missing=64), Place(50, 0, 0)], 128) == 1


def test_expected_output_is_bounded() -> None:
    assert expected_output(10**9, 0) == EXPECTED_OUTPUT
    assert expected_output(10, 4) == 6
    assert expected_output(10, 10) == expected_output(10, 12) == 1


def test_a_move_must_gain_and_never_go_where_there_is_no_place() -> None:
    here = Place(uncached=100, pending=500, open=8)
    assert should_move(here, Place(600, 0, 0), 128)
    assert not should_move(here, Place(2000, 0, 0), 128)
    assert not should_move(here, here, 128)
    assert not should_move(here, Place(1, 0, 0, short=1), 128)
