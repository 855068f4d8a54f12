"""How long sequences took and how large steps were, for metrics. Pure; all groups share it.

Times are those of the core's clock. As in vLLM a preemption does not begin a time anew: what it costs shows where the
sequence was when it came.
"""

from math import inf

from common.buckets import Buckets
from common.metrics import METRICS
from services.scheduler.request import Sequence


def buckets(name: str) -> Buckets:
    return Buckets(METRICS[name].bounds)


class Figures:
    def __init__(self) -> None:
        self.step_tokens = buckets("step_tokens")
        self.queue = buckets("queue_seconds")
        self.prefill = buckets("prefill_seconds")
        self.prefill_per_token = buckets("prefill_seconds_per_token")
        self.decode = buckets("decode_seconds")
        self.inference = buckets("inference_seconds")
        self.preemptions = buckets("sequence_preemptions")
        self.computed_tokens = buckets("sequence_computed_tokens")

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """A sequence that ended before its first step, or before its first token, has no times behind that."""
        started_s, first_s = sequence.started_s, sequence.first_s
        if started_s == inf:
            return
        computed = sequence.request.num_prompt - max(sequence.cached_tokens, 0)
        self.queue.add(started_s - sequence.admitted_s)
        self.preemptions.add(sequence.preemptions)
        self.computed_tokens.add(computed)
        if first_s == inf:
            return
        self.prefill.add(first_s - started_s)
        self.prefill_per_token.add((first_s - started_s) / max(computed, 1))
        self.decode.add(now_s - first_s)
        self.inference.add(now_s - started_s)

    def packed(self) -> dict[str, bytes]:
        """By the names of common/metrics.py."""
        return {
            "step_tokens": self.step_tokens.pack(),
            "queue_seconds": self.queue.pack(),
            "prefill_seconds": self.prefill.pack(),
            "prefill_seconds_per_token": self.prefill_per_token.pack(),
            "decode_seconds": self.decode.pack(),
            "inference_seconds": self.inference.pack(),
            "sequence_preemptions": self.preemptions.pack(),
            "sequence_computed_tokens": self.computed_tokens.pack(),
        }
