"""The names of all figures that processes report in heartbeats, and what they mean.

Every process counts in plain integers and sends them with its heartbeat; the API serves all of them on /metrics with
the labels `service` and `instance`. A name that is not listed here is a programming error (`checked`). A figure with
further labels has a key for each of their values (`series`). docs/metrics.md lists all names; a test compares.
"""

from typing import Literal, NamedTuple

import msgspec

TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip  # noqa: E501
ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip  # noqa: E501
E2E_BOUNDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip  # noqa: E501
PREFILL_TOKEN_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TOKEN_BOUNDS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
STEP_BOUNDS = (1.0, *(float(2**power) for power in range(3, 15)))
CHOICES_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS_BOUNDS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
ENGINE = ("engine",)


class Metric(NamedTuple):
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()  # besides service and instance; only the last one's values may contain a bar
    bounds: tuple[float, ...] = ()  # of a histogram


def histogram(meaning: str, bounds: tuple[float, ...], labels: tuple[str, ...] = ()) -> Metric:
    return Metric("histogram", meaning, labels, bounds)


METRICS = {
    "link_received": Metric("counter", "Frames received from other processes"),
    "link_sent": Metric("counter", "Frames sent to other processes"),
    "link_bad_frame": Metric("counter", "Frames dropped because they are no message of this receiver"),
    "link_bad_version": Metric("counter", "Frames dropped because of another protocol version"),
    "link_dead_sender": Metric("counter", "Frames dropped because their sender has left or was replaced"),
    "link_refused": Metric("counter", "Sends that found the link full"),
    "resident_bytes": Metric("gauge", "Memory of the process"),
    "cpu_seconds": Metric("counter", "Processor time of the process, user and system"),
    "work_owed": Metric("gauge", "Pieces of work that wait for this process or run in it"),
    "stalled_seconds": Metric("gauge", "Time for which work has waited and this process has done none"),
    "open_requests": Metric("gauge", "Requests that this process has open"),
    "requests": Metric("counter", "Requests accepted"),
    "refused": Metric("counter", "Requests refused"),
    "recovered": Metric("counter", "Choices handed to another tokenizer because theirs had gone"),
    "prompt_tokens": Metric("counter", "Prompt tokens of accepted requests"),
    "cached_tokens": Metric("counter", "Prompt tokens found in the prefix cache"),
    "output_tokens": Metric("counter", "Output tokens"),
    "computed_tokens": Metric("counter", "Prompt tokens that were not found in the prefix cache when they first ran"),
    "queue_full": Metric("counter", "Requests refused by what the scheduler's queue was full of", ("reason",)),
    "preemptions": Metric("counter", "Sequences put back to waiting because KV blocks ran out"),
    "pauses": Metric("counter", "Sequences taken out of execution because their clients do not read"),
    "steps": Metric("counter", "Steps planned or run"),
    "step_seconds": Metric("counter", "Time spent in steps"),
    "startup_seconds": Metric("gauge", "Time from the start of the worker's engine until it could serve"),
    "startup_weights_seconds": Metric("gauge", "Part of startup_seconds: reading weights"),
    "startup_compile_seconds": Metric("gauge", "Part of startup_seconds: compiling kernels, or finding them compiled"),
    "startup_memory_seconds": Metric("gauge", "Part of startup_seconds: measuring memory"),
    "startup_capture_seconds": Metric("gauge", "Part of startup_seconds: capturing graphs"),
    "kernels_compiled": Metric("gauge", "Kernels and graphs that the worker compiled at its start"),
    "kernels_found": Metric("gauge", "Kernels and graphs that the worker found compiled at its start"),
    "kernels_late": Metric("counter", "Kernels and graphs compiled after the start, while requests waited"),
    "worker_faults": Metric("counter", "Results that no worker may send; the worker is then replaced"),
    "stuck_steps": Metric("counter", "Steps without a result by their deadline; the worker is then replaced"),
    "failed_steps": Metric("counter", "Steps that the worker could not run"),
    "out_of_memory": Metric("counter", "Requests ended because the device had no memory for their part of a step"),
    "unknown_results": Metric("counter", "Results and requests for something unknown or already ended"),
    "drafts": Metric("counter", "Rows of steps in which draft tokens were verified"),
    "draft_tokens": Metric("counter", "Draft tokens verified"),
    "accepted_tokens": Metric("counter", "Draft tokens that held; each is an output token that cost no step"),
    **{
        f"accepted_at_{place}": Metric("counter", f"Drafts whose token number {place}, from 0, held")
        for place in range(8)
    },
    "draft_switches": Metric("counter", "Times that drafts began or ceased to pay, trials included"),
    "moved": Metric("counter", "Sequences moved to another worker group because theirs had gone or was busy"),
    "group_running": Metric("gauge", "Sequences with a row in this worker's group"),
    "group_waiting": Metric("gauge", "Sequences that wait for a row in this worker's group"),
    "group_blocks": Metric("gauge", "KV blocks of this worker's group"),
    "group_blocks_free": Metric("gauge", "KV blocks of this worker's group that hold nothing"),
    "group_blocks_cached": Metric("gauge", "KV blocks of this worker's group that hold only a reusable prefix"),
    "finished": Metric("counter", "Choices by finish reason", ("engine", "reason")),
    "slow_clients": Metric("counter", "Streams cut because the client did not read"),
    "slow_client_pauses": Metric("counter", "Streams paused because of it"),
    "http_requests": Metric("counter", "HTTP answers", ("method", "status", "route")),
    "http_request_duration_seconds": histogram("Time to an answer's last byte", E2E_BOUNDS, ("method", "route")),
    "api_key_requests": Metric("counter", "POST requests by API key, also those over its limits", ("result", "key")),
    "time_to_first_token_seconds": histogram("From the request's arrival to its first token", TTFT_BOUNDS, ENGINE),
    "inter_token_latency_seconds": histogram("Between tokens of one choice", ITL_BOUNDS, ENGINE),
    "request_time_per_output_token_seconds": histogram(
        "Mean time between the tokens of a choice that has ended", ITL_BOUNDS, ENGINE
    ),
    "e2e_request_latency_seconds": histogram("From the request's arrival to a choice's end", E2E_BOUNDS, ENGINE),
    "request_prompt_tokens": histogram("Prompt tokens of a prompt", TOKEN_BOUNDS, ENGINE),
    "request_generation_tokens": histogram("Output tokens of a choice", TOKEN_BOUNDS, ENGINE),
    "request_max_num_generation_tokens": histogram(
        "Output tokens of the longest choice of a request", TOKEN_BOUNDS, ENGINE
    ),
    "request_params_max_tokens": histogram("Output tokens that a request allowed", TOKEN_BOUNDS, ENGINE),
    "request_params_n": histogram("Choices that a request asked for, of each prompt", CHOICES_BOUNDS, ENGINE),
    "step_tokens": histogram("Tokens that a step computed", STEP_BOUNDS),
    "queue_seconds": histogram("From a sequence's admission to its first step", E2E_BOUNDS),
    "prefill_seconds": histogram("From a sequence's first step to its first token", E2E_BOUNDS),
    "prefill_seconds_per_token": histogram("The same, for each prompt token that was computed", PREFILL_TOKEN_BOUNDS),
    "decode_seconds": histogram("From a sequence's first token to its end", E2E_BOUNDS),
    "inference_seconds": histogram("From a sequence's first step to its end", E2E_BOUNDS),
    "sequence_preemptions": histogram("How often a sequence was preempted", PREEMPTIONS_BOUNDS),
    "sequence_computed_tokens": histogram("Prompt tokens of a sequence that were computed", TOKEN_BOUNDS),
}


def series(name: str, *labels: object) -> str:
    """The key of a figure with these values of its labels."""
    return "|".join((name, *map(str, labels)))


def parsed(key: str) -> tuple[str, list[str]] | None:
    """Name and values of the labels; None for what is not known here, as a newer process may send."""
    name, *rest = key.split("|", 1)
    metric = METRICS.get(name)
    if metric is None:
        return None
    values = rest[0].split("|", len(metric.labels) - 1) if rest and metric.labels else rest
    return (name, values) if len(values) == len(metric.labels) else None


def checked(values: dict[str, float]) -> dict[str, float]:
    """The values as messages carry them; raises KeyError for a name that METRICS does not list."""
    for name in values:
        if parsed(name) is None:
            raise KeyError(f"metric {name} is not listed in common/metrics.py")
    return {name: float(value) for name, value in values.items()}  # a sum of what peers say may exceed 64 bits


def link_metrics(counters: msgspec.Struct) -> dict[str, float]:
    """LinkCounters as metrics."""
    return {f"link_{name}": value for name, value in msgspec.structs.asdict(counters).items()}
