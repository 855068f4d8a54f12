"""One step of the model: the calls of a step in order, nothing else. Called by the engine; owns no state itself.

apply the plan, copy blocks, build the batch, run the model, sample, commit, start the copy to the host. No call waits
for the device, so the next step may be started before this one's tokens are known. A decode step that a graph covers
is one replay; rows whose sampling asks for more are drawn again from its logits. Warm-up runs ordinary plans.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from common.protocol import StepPlan
from services.worker import graphs, inputs
from services.worker.graphs import RING, DecodeInputs, GraphKey, Graphs
from services.worker.kernels.ops.draw import draw
from services.worker.kernels.ops.gather_tokens import gather_tokens
from services.worker.kernels.ops.store_tokens import store_tokens
from services.worker.kernels.registry import Bindings
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import RopeTable
from services.worker.sampler import Sampler
from services.worker.staging import Array, staging
from services.worker.state import Rows, Step

STAGED_BYTES = 1 << 20  # a step of 16,384 tokens


class StepTokens:
    """The sampled tokens of one step, on their way to the host."""

    def __init__(self, sampled: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        if stream is None:
            self._tokens = sampled
            return
        self._tokens = torch.empty(sampled.shape, dtype=sampled.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(sampled.device))
        with torch.cuda.stream(stream):
            self._tokens.copy_(sampled, non_blocking=True)
            sampled.record_stream(stream)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def ready(self) -> bool:
        """Whether `tokens` would return without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def tokens(self) -> bytes:
        """_i32 sampled tokens in the plan's order of rows; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.numpy().tobytes()


class Runner:
    def __init__(self, model: Decoder, rows: Rows, cache: KvCache, rope: RopeTable, bindings: Bindings) -> None:
        self.model, self.rows, self.cache, self.rope = model, rows, cache, rope
        self.sampler = Sampler(bindings)
        self._draw, self._gather, self._store = bindings(draw), bindings(gather_tokens), bindings(store_tokens)
        device = rows.tokens.device
        self._staging = staging(STAGED_BYTES, device)
        self._graphs: Graphs | None = None
        self._results: Tensor | None = None  # int32 [RING, rows], what graphs have drawn
        self._query_starts = torch.arange(len(rows.live) + 1, dtype=torch.int32, device=device)
        self._turn = 0
        on_gpu = device.type != "cpu"
        self._to_host = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def execute(self, plan: StepPlan) -> StepTokens:
        """Starts the plan's step. Raises AssertionError for a plan that does not fit the rows."""
        step = self.rows.apply(plan)
        if plan.copy_source:
            self.cache.copy_blocks(
                np.frombuffer(plan.copy_source, np.int32).tolist(), np.frombuffer(plan.copy_target, np.int32).tolist()
            )
        return self.run(step)

    @torch.inference_mode()
    def run(self, step: Step) -> StepTokens:
        """Starts a step of rows that are up to date; after an out-of-memory error it may be run again."""
        key = graphs.choose(step, self._graphs.sizes) if self._graphs is not None else None
        if key is not None:
            sampled = self._replay(key, step)
        elif len(step.slots):
            sampled = self._run_eagerly(step)
        else:
            sampled = torch.empty(0, dtype=torch.int32, device=self.rows.tokens.device)
        self._staging.done()
        self.rows.commit(step, sampled)
        return StepTokens(sampled, self._to_host)

    def _run_eagerly(self, step: Step) -> Tensor:
        rows, put = self.rows, self._staging.put
        batch = inputs.build(step, rows, put)
        context = step.positions + step.counts
        slots = step.slots[step.samples]
        sampling = inputs.sampling_batch(slots, context[step.samples], rows, put) if len(slots) else None
        self._staging.send()
        ids = self._gather(
            rows.tokens,
            rows.resident,
            batch.token_places,
            batch.token_rows,
            batch.positions,
            batch.kv_slots,
            rows.block_tokens,
        )
        x = self.model(ids, self.rope.at(batch.positions), batch.kv_slots, batch.rows, self.cache, batch.outputs)
        if not len(slots):
            return torch.empty(0, dtype=torch.int32, device=rows.tokens.device)
        sampled = self.sampler(self.model.logits(x), sampling, rows.penalties)
        self._store(rows.tokens, None, batch.sampled_places, sampled, None)
        return sampled

    def _replay(self, key: GraphKey, step: Step) -> Tensor:
        assert self._graphs is not None and self._results is not None
        rows, staged_by = self.rows, self._staging
        self._turn = (self._turn + 1) % RING
        staged = staged_by.put_together((*self._columns(step, key.size), np.array([self._turn], np.int32)))
        filtered = np.flatnonzero(~rows.is_plain[step.slots])
        context = step.positions + 1
        if len(filtered):
            slots = step.slots[filtered]
            sampling = inputs.sampling_batch(slots, context[filtered], rows, staged_by.put)
            index, places = staged_by.put(filtered), staged_by.put(slots * rows.tokens.shape[1] + context[filtered])
        staged_by.send()
        logits = self._graphs.replay(key, staged)
        sampled = self._results[self._turn, : len(step.slots)]
        if len(filtered):
            redrawn = self.sampler(logits.index_select(0, index), sampling, rows.penalties)
            self._store(rows.tokens, None, places, redrawn, None)
            sampled.index_copy_(0, index, redrawn)
        return sampled

    def _columns(self, step: Step, size: int) -> tuple[Array, ...]:
        return tuple(inputs.decode_columns(step, self.rows, size, self.cache.num_blocks - 1))

    def _decode(self, given: DecodeInputs) -> Tensor:
        """The whole decode step on the device, as it is captured. Returns the logits."""
        rows = self.rows
        places, positions, slots, sampled_places = given.wide.unbind(0)
        ids = self._gather(rows.tokens, rows.resident, places, given.slots, positions, slots, rows.block_tokens)
        attention = given.attention_rows(rows, self._query_starts)
        x = self.model(ids, self.rope.at(positions), slots, attention, self.cache, None)
        logits = self.model.logits(x)
        sampled = self._draw(logits, given.temperature, *given.draw.unbind(0))
        self._store(rows.tokens, self._results, sampled_places, sampled, given.ring)
        return logits

    @torch.inference_mode()
    def capture(self, limit: int, report: Callable[[int, int], None]) -> None:
        """Captures decode steps of up to `limit` rows; only the padding row and the last KV block are written."""
        rows = self.rows
        device, max_rows = rows.tokens.device, len(rows.live)
        self._results = torch.zeros(RING, max_rows + 1, dtype=torch.int32, device=device)
        captured = Graphs(device, min(limit, max_rows))
        none = np.zeros(0, np.int64)
        nobody = Step(none, none, none, none.astype(np.bool_))
        captured.capture(
            graphs.sizes(max_rows, limit),
            lambda size: (*self._columns(nobody, size), np.zeros(1, np.int32)),
            self._decode,
            report,
        )
        self._graphs = captured
