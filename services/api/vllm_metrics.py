"""vLLM's metric names, types, labels and buckets, from our own figures: what dashboards and routers of the field read.

Pure; called by /metrics. An engine is a scheduler, by its instance. What a scheduler counts carries its number; what
an API counts of a scheduler's work is summed over all API processes. Every series exists from the start, at 0.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from common.buckets import cumulative, unpack
from common.ledger import Standing
from common.membership import Membership
from common.metrics import E2E_BOUNDS, ITL_BOUNDS, METRICS, TTFT_BOUNDS, parsed, series
from common.protocol import Load
from services.api.figures import REASONS

LABELS = ("model_name", "engine")


class Count(NamedTuple):
    """A counter with one further label at most: figures whose sum each of its values has."""

    meaning: str
    figures: dict[str, tuple[str, ...]]  # by the label's value; "" without a label
    label: str = ""


class Distribution(NamedTuple):
    """A histogram: the figure that it is, and those of its bounds that vLLM has."""

    meaning: str
    figure: str
    bounds: tuple[float, ...] = ()  # empty: all of the figure's


def plain(meaning: str, *figures: str) -> Count:
    return Count(meaning, {"": figures})


NOTHING: tuple[str, ...] = ()  # no part of this server does that: always 0
TRANSFERS = "by another server; this one fetches none"
COUNTERS = {
    "prompt_tokens": plain("Prompt tokens processed", "computed_tokens", "cached_tokens"),
    "prompt_tokens_by_source": Count(
        "Prompt tokens by where their KV came from",
        {
            "local_compute": ("computed_tokens",),
            "local_cache_hit": ("cached_tokens",),
            "external_kv_transfer": NOTHING,
        },
        "source",
    ),
    "prompt_tokens_cached": plain("Prompt tokens found in the prefix cache", "cached_tokens"),
    "prompt_tokens_recomputed": plain("Cached prompt tokens that were computed again", *NOTHING),
    "generation_tokens": plain("Tokens generated", "output_tokens"),
    "prefix_cache_queries": plain("Prompt tokens looked up in the prefix cache", "computed_tokens", "cached_tokens"),
    "prefix_cache_hits": plain("Prompt tokens found in the prefix cache", "cached_tokens"),
    "gpu_prefix_cache_queries": plain("Old name of prefix_cache_queries", "computed_tokens", "cached_tokens"),
    "gpu_prefix_cache_hits": plain("Old name of prefix_cache_hits", "cached_tokens"),
    "external_prefix_cache_queries": plain(f"Prompt tokens looked up {TRANSFERS}", *NOTHING),
    "external_prefix_cache_hits": plain(f"Prompt tokens found {TRANSFERS}", *NOTHING),
    "mm_cache_queries": plain("Items of other media looked up; this server takes text", *NOTHING),
    "mm_cache_hits": plain("Items of other media found; this server takes text", *NOTHING),
    "num_preemptions": plain("Sequences put back to waiting", "preemptions"),
    "request_success": Count(
        "Choices by finish reason",
        {reason: (f"finished|{{engine}}|{reason}",) for reason in REASONS},
        "finished_reason",
    ),
    "admission_rejections": Count(
        "Requests refused because the scheduler's queue was full",
        {reason: (series("queue_full", reason),) for reason in ("max_num_queued_reqs", "max_num_queued_tokens")},
        "reason",
    ),
    "spec_decode_num_drafts": plain("Rows of steps in which drafts were verified", "drafts"),
    "spec_decode_num_draft_tokens": plain("Draft tokens verified", "draft_tokens"),
    "spec_decode_num_accepted_tokens": plain("Draft tokens that held", "accepted_tokens"),
    "spec_decode_num_accepted_tokens_per_pos": Count(
        "Draft tokens that held",
        {name.removeprefix("accepted_at_"): (name,) for name in METRICS if name.startswith("accepted_at_")},
        "position",
    ),
}

LATENCY_BOUNDS = tuple(bound for bound in E2E_BOUNDS if bound >= 0.3)
GAP_BOUNDS = tuple(bound for bound in ITL_BOUNDS if bound >= 0.01)
HISTOGRAMS = {
    "time_to_first_token_seconds": Distribution(
        "From a request's arrival to its first token", "time_to_first_token_seconds", TTFT_BOUNDS
    ),
    "inter_token_latency_seconds": Distribution(
        "Between tokens of a choice", "inter_token_latency_seconds", GAP_BOUNDS
    ),
    "time_per_output_token_seconds": Distribution(
        "Old name of inter_token_latency_seconds", "inter_token_latency_seconds", GAP_BOUNDS
    ),
    "request_time_per_output_token_seconds": Distribution(
        "Mean time between the tokens of a choice", "request_time_per_output_token_seconds", GAP_BOUNDS
    ),
    "e2e_request_latency_seconds": Distribution(
        "From a request's arrival to a choice's end", "e2e_request_latency_seconds", LATENCY_BOUNDS
    ),
    "request_queue_time_seconds": Distribution("In the queue", "queue_seconds", LATENCY_BOUNDS),
    "request_prefill_time_seconds": Distribution("From first step to first token", "prefill_seconds", LATENCY_BOUNDS),
    "request_decode_time_seconds": Distribution("From first token to end", "decode_seconds", LATENCY_BOUNDS),
    "request_inference_time_seconds": Distribution("From first step to end", "inference_seconds", LATENCY_BOUNDS),
    "time_per_prefill_token_request_seconds": Distribution(
        "Prefill time for each prompt token that was computed", "prefill_seconds_per_token"
    ),
    "request_prompt_tokens": Distribution("Prompt tokens of a prompt", "request_prompt_tokens"),
    "request_generation_tokens": Distribution("Output tokens of a choice", "request_generation_tokens"),
    "request_max_num_generation_tokens": Distribution(
        "Output tokens of the longest choice of a request", "request_max_num_generation_tokens"
    ),
    "request_params_max_tokens": Distribution("The request's max_tokens", "request_params_max_tokens"),
    "request_params_n": Distribution("The request's n", "request_params_n"),
    "request_prefill_kv_computed_tokens": Distribution(
        "Prompt tokens that were computed, without those of the prefix cache", "sequence_computed_tokens"
    ),
    "request_num_preemptions": Distribution("How often a sequence was preempted", "sequence_preemptions"),
    "iteration_tokens_total": Distribution("Tokens of a step", "step_tokens"),
}
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


def blocks_used(load: Load) -> float:
    """Share of the KV blocks, 0 to 1."""
    return 1 - (load.blocks_free + load.blocks_cached) / load.blocks_total if load.blocks_total else 0.0


class Totals:
    """Figures of the system by engine and key; a key has its engine in it where the API counts."""

    def __init__(self, standings: Iterable[Standing]) -> None:
        self.engines: set[int] = set()
        self._counters: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._histograms: dict[tuple[int, str], list[float]] = {}
        for standing in standings:
            if standing.service == "scheduler":
                self.engines.add(standing.instance)
            if standing.service not in ("scheduler", "api"):
                continue
            for key, value in standing.counters.items():
                if found := self._place(standing, key):
                    self._counters[found] += value
            for key, column in standing.histograms.items():
                if found := self._place(standing, key):
                    known = self._histograms.get(found) or [0.0] * self.size(found[1])
                    values = unpack(column, len(known))
                    self._histograms[found] = [mine + more for mine, more in zip(known, values, strict=True)]

    def _place(self, standing: Standing, key: str) -> tuple[int, str] | None:
        """The API's own count of what the scheduler counts, too, is none of an engine's."""
        found = parsed(key)
        if found is None:
            return None
        name, labels = found
        if METRICS[name].labels[:1] == ("engine",) and labels[0].isdecimal():
            engine = int(labels[0])
            self.engines.add(engine)
            return engine, name if len(labels) == 1 else key
        return (standing.instance, key) if standing.service == "scheduler" else None

    @staticmethod
    def size(name: str) -> int:
        return len(METRICS[name].bounds) + 2

    def counted(self, engine: int, figures: tuple[str, ...]) -> float:
        return sum(self._counters.get((engine, figure.format(engine=engine)), 0.0) for figure in figures)

    def histogram(self, engine: int, name: str) -> list[float]:
        return self._histograms.get((engine, name)) or [0.0] * self.size(name)


def families(view: Membership, standings: list[Standing]) -> Iterator[Metric]:
    model = view.model.name if view.model else ""
    totals = Totals(standings)
    engines = sorted(totals.engines | view.speaking.keys())
    yield from gauges(view, model)
    for name, (meaning, by_value, label) in COUNTERS.items():
        counter = CounterMetricFamily(f"vllm:{name}", meaning, labels=(*LABELS, label) if label else LABELS)
        for engine in engines:
            for value, names in by_value.items():
                extra = [value] if label else []
                counter.add_metric([model, str(engine), *extra], totals.counted(engine, names))
        yield counter
    longest = view.model.max_model_len if view.model else 0
    for name, (meaning, figure, shown) in HISTOGRAMS.items():
        bounds = METRICS[figure].bounds
        if not shown and bounds[-1] > longest > 0 and "tokens" in figure and figure != "step_tokens":
            shown = tuple(bound for bound in bounds if bound <= longest)  # vLLM's end at what the model can have
        family = HistogramMetricFamily(f"vllm:{name}", meaning, labels=LABELS)
        for engine in engines:
            *counts, total = totals.histogram(engine, figure)
            family.add_metric([model, str(engine)], cumulative(bounds, counts, shown or bounds), total)
        yield family


def gauges(view: Membership, model: str) -> Iterator[Metric]:
    """One engine per scheduler that speaks."""
    simple: dict[str, tuple[str, Callable[[Load], float]]] = {
        "num_requests_running": ("Sequences in execution", lambda load: float(load.running)),
        "num_requests_waiting": ("Sequences waiting for execution", lambda load: float(load.waiting)),
        "kv_cache_usage_perc": ("KV blocks in use, 0 to 1", blocks_used),
        "gpu_cache_usage_perc": ("KV blocks in use, 0 to 1 (old name)", blocks_used),
    }
    for name, (meaning, value) in simple.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", meaning, labels=LABELS)
        for instance, each in view.speaking.items():
            gauge.add_metric([model, str(instance)], value(each.load))
        yield gauge
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Sequences waiting, by what they wait for", labels=(*LABELS, "reason")
    )
    sleep = GaugeMetricFamily("vllm:engine_sleep_state", "1 for the state it is in", labels=(*LABELS, "sleep_state"))
    settings = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Settings of the KV cache",
        labels=(
            *("block_size", "cache_dtype", "num_gpu_blocks"),
            *("kv_cache_size_tokens", "kv_cache_max_concurrency", "engine"),
        ),
    )
    for instance, each in view.speaking.items():
        engine = str(instance)
        waiting.add_metric([model, engine, "capacity"], each.load.waiting)
        waiting.add_metric([model, engine, "deferred"], 0)
        for state in SLEEP_STATES:
            sleep.add_metric([model, engine, state], float(state == SLEEP_STATES[0]))
        if each.model:
            facts = each.model
            dtype = facts.kv_dtype or facts.dtype
            room = facts.block_tokens * facts.num_blocks
            sizes = str(facts.num_blocks), str(room), f"{room / facts.max_model_len:.2f}"
            settings.add_metric([str(facts.block_tokens), dtype, *sizes, engine], 1)
    yield waiting
    yield sleep
    yield settings
