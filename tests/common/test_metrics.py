import msgspec
import pytest

from common.metrics import METRICS, checked, link_metrics, parsed, series
from common.transport import LinkCounters


def test_link_counters_are_all_listed() -> None:
    values = link_metrics(LinkCounters(received=3))
    assert values["link_received"] == 3
    assert checked(values) == values


def test_an_unlisted_name_is_an_error() -> None:
    with pytest.raises(KeyError, match="no_such"):
        checked({"no_such": 1.0})


def test_every_metric_says_what_it_means() -> None:
    assert all(metric.meaning for metric in METRICS.values())
    assert all((metric.kind == "histogram") == bool(metric.bounds) for metric in METRICS.values())
    assert all(list(metric.bounds) == sorted(set(metric.bounds)) for metric in METRICS.values())


def test_only_the_last_label_may_hold_a_bar() -> None:
    assert parsed(series("http_requests", "GET", 200, "/a|b")) == ("http_requests", ["GET", "200", "/a|b"])
    assert parsed("requests") == ("requests", [])
    assert parsed("requests|x") is parsed("finished|0") is parsed("no_such") is None


def test_sums_beyond_64_bits_can_be_sent() -> None:
    assert msgspec.msgpack.encode(checked({"prompt_tokens": 2**64 + 2**64}))
