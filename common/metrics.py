"""The names of all figures that processes report in heartbeats, and what they mean.

Every process counts in plain integers and sends them with its heartbeat; the API serves all of them on /metrics with
the labels `service` and `instance`. A name that is not listed here is a programming error (`checked`).
"""

from typing import Literal, NamedTuple

import msgspec


class Metric(NamedTuple):
    kind: Literal["counter", "gauge"]
    meaning: str


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
}


def checked(values: dict[str, float]) -> dict[str, float]:
    """The values as messages carry them; raises KeyError for a name that METRICS does not list."""
    for name in values:
        if name not in METRICS:
            raise KeyError(f"metric {name} is not listed in common/metrics.py")
    return {name: float(value) for name, value in values.items()}  # a sum of what peers say may exceed 64 bits


def link_metrics(counters: msgspec.Struct) -> dict[str, float]:
    """LinkCounters as metrics."""
    return {f"link_{name}": value for name, value in msgspec.structs.asdict(counters).items()}
