"""GET /metrics: figures of every process of the system, under our names and vLLM's.

All of them come from heartbeats, with what processes had counted that are gone (common/ledger.py), so every replica
tells the same, and a counter does not fall when a process ends. docs/metrics.md lists all names.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from common.buckets import cumulative, unpack
from common.ledger import Standing
from common.membership import Membership
from common.metrics import METRICS, parsed
from common.protocol import Load
from services.api import vllm_metrics
from services.api.gateway import Gateway
from services.api.route import METRICS_PATH, Endpoint

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLACE = ("service", "instance")
Families = dict[str, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]


class Figures(Collector):
    """Reads the view at the time of the scrape."""

    def __init__(self, view: Membership) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        standings = self._view.standings()
        yield states(self._view)
        yield from figures(standings)
        yield from loads(self._view)
        yield from vllm_metrics.families(self._view, standings)


def states(view: Membership) -> Metric:
    up = GaugeMetricFamily("valence_up", "Members by state; 1 for the state they are in", labels=(*PLACE, "state"))
    for member in view.members.values():
        up.add_metric([member.peer.service, str(member.peer.instance), member.state], 1)
    return up


def figures(standings: list[Standing]) -> Iterator[Metric]:
    """Everything that heartbeats tell, by place."""
    families: Families = {}
    for standing in standings:
        place = [standing.service, str(standing.instance)]
        for key, value in standing.counters.items():
            if (found := parsed(key)) is None:
                continue  # a newer process; its meaning is not known here
            name, labels = found
            family = _family(families, name)
            if not isinstance(family, HistogramMetricFamily):
                family.add_metric([*place, *labels], value)
        for key, column in standing.histograms.items():
            if (found := parsed(key)) is None:
                continue
            name, labels = found
            bounds, family = METRICS[name].bounds, _family(families, name)
            if isinstance(family, HistogramMetricFamily):
                *counts, total = unpack(column, len(bounds) + 2)
                family.add_metric([*place, *labels], cumulative(bounds, counts, bounds), total)
    yield from families.values()


KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


def _family(families: Families, name: str) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    if name not in families:
        kind, meaning, labels, _ = METRICS[name]
        families[name] = KINDS[kind](f"valence_{name}", meaning, labels=(*PLACE, *labels))
    return families[name]


def loads(view: Membership) -> Iterator[Metric]:
    """The schedulers' gauges."""
    for name in Load.__struct_fields__:
        if name != "steps":
            gauge = GaugeMetricFamily(f"valence_load_{name}", f"Scheduler gauge: {name}", labels=("instance",))
            for instance, each in view.speaking.items():
                gauge.add_metric([str(instance)], getattr(each.load, name))
            yield gauge


async def metrics(gateway: Gateway, request: Request) -> Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Figures(gateway.node.view))
    if "application/openmetrics-text" in request.headers.get("accept", ""):
        # Our names need no escaping. Where the library is to escape, it takes the colon out of names, too.
        text: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return Response(text, media_type=OPENMETRICS)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


ENDPOINTS = [
    Endpoint("GET", METRICS_PATH, metrics, "Figures in Prometheus' text format", admin=True, media_type="text/plain")
]
