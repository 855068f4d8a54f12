"""One step of the model: the calls of a step in order, nothing else. Called by the engine; owns no state itself.

apply the plan, copy blocks, build the batch, run the model, sample, commit, start the copy to the host. No call waits
for the device, so the next step may be started before this one's tokens are known. Warm-up runs ordinary plans.
"""

import numpy as np
import torch
from torch import Tensor

from common.protocol import StepPlan
from services.worker import inputs
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import RopeTable
from services.worker.sampler import Sampler
from services.worker.state import Rows


class StepTokens:
    """The sampled tokens of one step, on their way to the host."""

    def __init__(self, sampled: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if sampled.device.type == "cpu":
            self._tokens = sampled
            return
        self._tokens = torch.empty(sampled.shape, dtype=sampled.dtype, pin_memory=True)
        self._tokens.copy_(sampled, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def ready(self) -> bool:
        """Whether `tokens` would return without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def tokens(self) -> bytes:
        """_i32 sampled tokens in the plan's order of rows; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.numpy().tobytes()


class Runner:
    def __init__(self, model: Decoder, rows: Rows, cache: KvCache, rope: RopeTable, sampler: Sampler) -> None:
        self.model, self.rows, self.cache, self.rope, self.sampler = model, rows, cache, rope, sampler

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepTokens:
        """Starts the plan's step. Raises AssertionError for a plan that does not fit the rows."""
        rows = self.rows
        step = rows.apply(plan)
        if plan.copy_source:
            self.cache.copy_blocks(
                np.frombuffer(plan.copy_source, np.int32).tolist(), np.frombuffer(plan.copy_target, np.int32).tolist()
            )
        sampled = torch.empty(0, dtype=torch.int32, device=rows.tokens.device)
        if not len(step.slots):
            return StepTokens(sampled)
        batch = inputs.build(step, rows)
        x = self.model(
            rows.tokens.view(-1).index_select(0, batch.token_places),
            self.rope.at(batch.positions),
            batch.kv_slots,
            batch.rows,
            self.cache,
            batch.outputs,
        )
        if len(batch.sampled_places):
            sampled = self.sampler(self.model.logits(x).float(), batch.sampling, rows.penalties)
        rows.commit(step, batch.sampled_places, sampled)
        return StepTokens(sampled)
