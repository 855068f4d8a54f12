from common.buckets import unpack
from common.metrics import METRICS, checked, parsed
from services.api.figures import Answers, Figures


def test_answers_are_counted_by_route_and_status() -> None:
    figures = Answers()
    figures.answered("/a", "GET", 200, 0.1)
    figures.answered("/a", "GET", 200, 0.3)
    figures.answered("/a", "POST", 500, 0.1)
    assert figures.http == {("/a", "GET", 200): 2, ("/a", "POST", 500): 1}
    assert sum(figures.http_seconds["GET", "/a"].counts) == 2


def test_all_figures_go_by_listed_names_with_their_labels() -> None:
    figures = Figures()
    figures.at(3).finished["stop"] += 2
    figures.at(3).first_token.add(0.01)
    figures.edge.answered("/v1/files/{id}", "GET", 200, 0.1)
    figures.edge.keys["a|b", "accepted"] += 1
    counters = checked(figures.counters())
    assert counters["finished|3|stop"] == 2 and counters["http_requests|GET|200|/v1/files/{id}"] == 1
    assert parsed("api_key_requests|accepted|a|b") == ("api_key_requests", ["accepted", "a|b"])
    histograms = figures.histograms()
    for key, column in histograms.items():
        found = parsed(key)
        assert found and len(column) == 8 * (len(METRICS[found[0]].bounds) + 2)
    name = "time_to_first_token_seconds"
    assert unpack(histograms[f"{name}|3"], len(METRICS[name].bounds) + 2)[-1] == 0.01
