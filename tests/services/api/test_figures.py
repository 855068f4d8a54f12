from services.api.figures import Answers, Buckets


def test_values_fall_below_their_bounds() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        buckets.add(value)
    buckets.add(2.0, times=3)
    assert buckets.counts == [2, 4, 1] and buckets.total == 11.5
    assert buckets.cumulative() == [("1.0", 2.0), ("2.0", 6.0), ("+Inf", 7.0)]


def test_answers_are_counted_by_route_and_status() -> None:
    figures = Answers()
    figures.answered("/a", "GET", 200, 0.1)
    figures.answered("/a", "GET", 200, 0.3)
    figures.answered("/a", "POST", 500, 0.1)
    assert figures.http == {("/a", "GET", 200): 2, ("/a", "POST", 500): 1}
    assert sum(figures.http_seconds["/a"].counts) == 3
