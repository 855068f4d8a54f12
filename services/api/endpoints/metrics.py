"""GET /metrics: figures of every process of the system, this replica's latencies, and vLLM's names for both.

Counters of all processes come from their heartbeats, so every replica tells the same; histograms and HTTP answers are
this replica's own and carry its `instance`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from common.membership import Membership
from common.metrics import METRICS
from common.protocol import Load
from services.api.figures import Buckets
from services.api.gateway import Gateway
from services.api.route import METRICS_PATH, Endpoint

VLLM_COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens processed"),
    "vllm:generation_tokens": ("output_tokens", "Tokens generated"),
    "vllm:prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache"),
    "vllm:prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache"),
    "vllm:num_preemptions": ("preemptions", "Sequences put back to waiting"),
    "vllm:spec_decode_num_drafts": ("drafts", "Rows of steps in which drafts were verified"),
    "vllm:spec_decode_num_draft_tokens": ("draft_tokens", "Draft tokens verified"),
    "vllm:spec_decode_num_accepted_tokens": ("accepted_tokens", "Draft tokens that held"),
}


ACCEPTED_AT = "accepted_at_"


def blocks_used(load: Load) -> float:
    """Share of the KV blocks, 0 to 1."""
    return 1 - (load.blocks_free + load.blocks_cached) / load.blocks_total if load.blocks_total else 0.0


VLLM_GAUGES: dict[str, tuple[str, Callable[[Load], float]]] = {  # one engine per scheduler
    "num_requests_running": ("Sequences in execution", lambda load: float(load.running)),
    "num_requests_waiting": ("Sequences waiting for execution", lambda load: float(load.waiting)),
    "kv_cache_usage_perc": ("KV blocks in use, 0 to 1", blocks_used),
    "gpu_cache_usage_perc": ("KV blocks in use, 0 to 1 (old name)", blocks_used),
}


class Figures(Collector):
    """Reads the gateway at the time of the scrape."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[Metric]:
        gateway = self._gateway
        view, instance = gateway.node.view, str(gateway.instance)
        yield from members(view)
        yield from load(view)
        yield from own(gateway, instance)
        yield from vllm(gateway, view)


def members(view: Membership) -> Iterator[Metric]:
    """Every counter of every member's heartbeat, and its state."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    up = GaugeMetricFamily("valence_up", "Members by state; 1 for the state they are in", labels=(*PLACE, "state"))
    for member in view.members.values():
        place = [member.peer.service, str(member.peer.instance)]
        up.add_metric([*place, member.state], 1)
        for name, value in member.counters.items():
            if name not in METRICS:
                continue  # a newer process; its meaning is not known here
            kind, meaning = METRICS[name]
            if name not in families:
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                families[name] = family(f"valence_{name}", meaning, labels=PLACE)
            families[name].add_metric(place, value)
    yield up
    yield from families.values()


PLACE = ("service", "instance")
KEYED = ("instance", "key", "result")


def load(view: Membership) -> Iterator[Metric]:
    """The schedulers' gauges."""
    for name in Load.__struct_fields__:
        if name != "steps":
            gauge = GaugeMetricFamily(f"valence_load_{name}", f"Scheduler gauge: {name}", labels=("instance",))
            for instance, each in view.speaking.items():
                gauge.add_metric([str(instance)], getattr(each.load, name))
            yield gauge


def own(gateway: Gateway, instance: str) -> Iterator[Metric]:
    """What this replica measured."""
    figures = gateway.figures
    answers = CounterMetricFamily(
        "valence_http_requests", "HTTP answers", labels=("instance", "route", "method", "status")
    )
    for (route, method, status), count in sorted(figures.edge.http.items()):
        answers.add_metric([instance, route, method, str(status)], count)
    yield answers
    seconds = HistogramMetricFamily(
        "valence_http_request_duration_seconds", "Time to an answer's last byte", labels=("instance", "route")
    )
    for route, buckets in sorted(figures.edge.http_seconds.items()):
        seconds.add_metric([instance, route], buckets.cumulative(), buckets.total)
    yield seconds
    by_key = CounterMetricFamily(
        "valence_api_key_requests", "POST requests by API key, also those over its limits", labels=KEYED
    )
    for (name, result), count in sorted(figures.edge.keys.items()):
        by_key.add_metric([instance, name, result], count)
    yield by_key
    yield from latencies(gateway, "valence_", ("instance",), [instance])
    finished = CounterMetricFamily("valence_finished", "Choices by finish reason", labels=("instance", "reason"))
    for reason, count in figures.finished.items():
        finished.add_metric([instance, reason], count)
    yield finished
    yield CounterMetricFamily(
        "valence_slow_clients", "Streams cut because the client did not read", figures.slow_clients
    )
    yield CounterMetricFamily("valence_slow_client_pauses", "Streams paused because of it", figures.pauses)


def latencies(gateway: Gateway, prefix: str, labels: tuple[str, ...], values: list[str]) -> Iterator[Metric]:
    figures = gateway.figures
    histograms: list[tuple[str, str, Buckets]] = [
        ("time_to_first_token_seconds", "From the request's arrival to its first token", figures.first_token),
        ("inter_token_latency_seconds", "Between tokens of one choice", figures.inter_token),
        ("e2e_request_latency_seconds", "From the request's arrival to a choice's end", figures.request),
        ("request_prompt_tokens", "Prompt tokens of a prompt", figures.prompt_size),
        ("request_generation_tokens", "Output tokens of a choice", figures.output_size),
    ]
    for name, meaning, buckets in histograms:
        family = HistogramMetricFamily(prefix + name, meaning, labels=labels)
        family.add_metric(values, buckets.cumulative(), buckets.total)
        yield family


def vllm(gateway: Gateway, view: Membership) -> Iterator[Metric]:
    """The names that dashboards, autoscalers and routers of the field read."""
    model = view.model
    labels, values = ("model_name", "engine"), [model.name if model else "", "0"]
    for name, (meaning, value) in VLLM_GAUGES.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", meaning, labels=labels)
        for instance, each in view.speaking.items():
            gauge.add_metric([values[0], str(instance)], value(each.load))
        yield gauge
    settings = GaugeMetricFamily(
        "vllm:cache_config_info", "Settings of the KV cache", labels=("block_size", "num_gpu_blocks", "engine")
    )
    for instance, each in view.speaking.items():
        if each.model:
            settings.add_metric([str(each.model.block_tokens), str(each.model.num_blocks), str(instance)], 1)
    yield settings
    for name, (figure, meaning) in VLLM_COUNTERS.items():
        counter = CounterMetricFamily(name, meaning, labels=labels)
        counter.add_metric(values, total(view, figure))
        yield counter
    held = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens that held", labels=(*labels, "position")
    )
    for place in range(sum(name.startswith(ACCEPTED_AT) for name in METRICS)):
        held.add_metric([*values, str(place)], total(view, f"{ACCEPTED_AT}{place}"))
    yield held
    success = CounterMetricFamily(
        "vllm:request_success", "Choices by finish reason", labels=(*labels, "finished_reason")
    )
    for reason, count in gateway.figures.finished.items():
        success.add_metric([*values, reason], count)
    yield success
    yield from latencies(gateway, "vllm:", labels, values)


def total(view: Membership, figure: str) -> float:
    """A counter of the whole system: that of the schedulers if they count it, else the sum over the APIs."""
    by_service: Counter[str] = Counter()
    for member in view.members.values():
        if figure in member.counters:
            by_service[member.peer.service] += member.counters[figure]  # type: ignore[assignment]
    return float(by_service.get("scheduler", by_service["api"]))


async def metrics(gateway: Gateway, request: Request) -> Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Figures(gateway))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


ENDPOINTS = [
    Endpoint("GET", METRICS_PATH, metrics, "Figures in Prometheus' text format", admin=True, media_type="text/plain")
]
