"""How long sequences took and how large steps were, for metrics. Pure; all groups share it.

Times are those of the core's clock. As in vLLM a preemption does not begin a time anew: what it costs shows where the
sequence was when it came.
"""

from math import inf

from common.buckets import Buckets
from common.metrics import METRICS
from services.scheduler.request import Sequence

NAMES = (
    "step_tokens",
    "queue_seconds",
    "prefill_seconds",
    "prefill_seconds_per_token",
    "decode_seconds",
    "inference_seconds",
    "sequence_preemptions",
    "sequence_computed_tokens",
)


class Figures:
    def __init__(self) -> None:
        self.buckets = {name: Buckets(METRICS[name].bounds) for name in NAMES}
        self.step_tokens = self.buckets["step_tokens"]

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """A sequence that ended before its first step, or before its first token, has no times behind that."""
        if sequence.started_s == inf:
            return
        add = {name: each.add for name, each in self.buckets.items()}
        add["queue_seconds"](sequence.started_s - sequence.admitted_s)
        add["sequence_preemptions"](sequence.preemptions)
        computed = sequence.request.num_prompt - max(sequence.cached_tokens, 0)
        add["sequence_computed_tokens"](computed)
        if sequence.first_s == inf:
            return
        prefill_s = sequence.first_s - sequence.started_s
        add["prefill_seconds"](prefill_s)
        add["prefill_seconds_per_token"](prefill_s / max(computed, 1))
        add["decode_seconds"](now_s - sequence.first_s)
        add["inference_seconds"](now_s - sequence.started_s)

    def packed(self) -> dict[str, bytes]:
        """By the names of common/metrics.py."""
        return {name: each.pack() for name, each in self.buckets.items()}
