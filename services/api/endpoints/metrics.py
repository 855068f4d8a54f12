"""GET /metrics: figures of every process of the system, under our names and vLLM's.

All of them come from heartbeats, with what processes had counted that are gone (common/ledger.py), so every replica
tells the same, and a counter does not fall when a process ends. docs/metrics.md lists all names.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator

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
KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
END = b"# EOF\n"  # of OpenMetrics
Encode = Callable[[Collector], bytes]


class One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def families(view: Membership) -> Iterator[Metric]:
    """All of them, as they stand while they are asked for."""
    standings = view.standings()
    yield states(view)
    yield from figures(standings)
    yield from loads(view)
    yield from vllm_metrics.families(view, standings)


def states(view: Membership) -> Metric:
    up = GaugeMetricFamily("valence_up", "Members by state; 1 for the state they are in", labels=(*PLACE, "state"))
    for member in view.members.values():
        up.add_metric([member.peer.service, str(member.peer.instance), member.state], 1)
    return up


def figures(standings: list[Standing]) -> Iterator[Metric]:
    """Everything that heartbeats tell, by place."""
    by_name: dict[str, list[tuple[list[str], float | bytes]]] = {}
    for standing in standings:
        told: Iterable[tuple[str, float | bytes]] = itertools.chain(
            standing.counters.items(), standing.histograms.items()
        )
        for key, value in told:
            if found := parsed(key):  # else from a newer process; its meaning is not known here
                name, labels = found
                by_name.setdefault(name, []).append(([standing.service, str(standing.instance), *labels], value))
    for name, rows in by_name.items():
        kind, meaning, more, bounds = METRICS[name]
        family = KINDS[kind](f"valence_{name}", meaning, labels=(*PLACE, *more))
        for labels, value in rows:
            if isinstance(family, HistogramMetricFamily) and isinstance(value, bytes):
                *counts, total = unpack(value, len(bounds) + 2)
                family.add_metric(labels, cumulative(bounds, counts, bounds), total)
            elif isinstance(value, float) and not isinstance(family, HistogramMetricFamily):
                family.add_metric(labels, value)
        yield family


def loads(view: Membership) -> Iterator[Metric]:
    """The schedulers' gauges."""
    for name in Load.__struct_fields__:
        if name != "steps":
            gauge = GaugeMetricFamily(f"valence_load_{name}", f"Scheduler gauge: {name}", labels=("instance",))
            for instance, each in view.speaking.items():
                gauge.add_metric([str(instance)], getattr(each.load, name))
            yield gauge


async def page(view: Membership, encode: Encode) -> bytes:
    """Streams go on between two families: a page is ten milliseconds of work."""
    parts = []
    for family in families(view):
        parts.append(encode(One(family)).removesuffix(END))
        await asyncio.sleep(0)
    return b"".join(parts)


def openmetrics_of(collector: Collector) -> bytes:
    """Our names need no escaping. Where the library is to escape, it takes the colon out of names, too."""
    text: bytes = openmetrics.generate_latest(collector, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return text


async def metrics(gateway: Gateway, request: Request) -> Response:
    view = gateway.node.view
    if "application/openmetrics-text" in request.headers.get("accept", ""):
        return Response(await page(view, openmetrics_of) + END, media_type=OPENMETRICS)
    return Response(await page(view, generate_latest), media_type=CONTENT_TYPE_PLAIN_0_0_4)


ENDPOINTS = [
    Endpoint("GET", METRICS_PATH, metrics, "Figures in Prometheus' text format", admin=True, media_type="text/plain")
]
