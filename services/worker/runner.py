"""One step of the model: the calls of a step in order, nothing else. Called by the engine; owns no state itself.

apply the plan, copy blocks, build the batch, run the model, sample, store the tokens, commit. No call waits for the
device, so the next step may be started before this one's tokens are known. A step that a graph covers is one replay;
rows whose sampling asks for more are drawn again from its logits. Warm-up runs ordinary plans.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import astuple
from torch import Tensor

from common.protocol import StepPlan
from services.worker import graphs, inputs
from services.worker.graphs import RING, Choice, GraphKey, Graphs, StepColumns, StepInputs, Tables
from services.worker.groups import GroupStep
from services.worker.kernels.ops.draw import draw
from services.worker.kernels.ops.gather_tokens import gather_tokens
from services.worker.kernels.ops.store_tokens import store_tokens
from services.worker.kernels.registry import Bindings
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import RopeTable
from services.worker.sampler import Sampler
from services.worker.staging import staging
from services.worker.state import Rows, Step

STAGED_BYTES = 1 << 20  # a step of 16,384 tokens


class StepTokens:
    """The sampled tokens of one step: `places` [S] of int32 `line` in memory of the host, there after `event`."""

    def __init__(
        self, line: npt.NDArray[np.int32], places: npt.NDArray[np.int64], event: torch.cuda.Event | None
    ) -> None:
        self._line, self._places, self._event = line, places, event

    def ready(self) -> bool:
        """Whether `tokens` would return without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def tokens(self) -> bytes:
        """_i32 sampled tokens in the plan's order of rows; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._line[self._places].tobytes()


class Results:
    """Lines of memory that the device writes sampled tokens to and the host reads; one per step, used by turns."""

    def __init__(self, width: int, device: torch.device) -> None:
        on_gpu = device.type != "cpu"
        self.lines = torch.zeros(RING, width, dtype=torch.int32, pin_memory=on_gpu)
        self.turn = 0
        self._host = self.lines.numpy()
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        self._events = [torch.cuda.Event() for _ in range(RING)] if on_gpu else []  # type: ignore[no-untyped-call]

    def next_turn(self) -> int:
        self.turn = (self.turn + 1) % RING
        return self.turn

    def taken(self, places: npt.NDArray[np.int64]) -> StepTokens:
        """This turn's tokens at `places`, when all that was launched so far is done."""
        line = self._host[self.turn]
        if self._stream is None:
            return StepTokens(line.copy(), places, None)
        event = self._events[self.turn]
        event.record(self._stream)
        return StepTokens(line, places, event)


def copies_of(plan: StepPlan) -> Iterator[tuple[int, list[int], list[int]]]:
    """Pool, source and target blocks of each of the plan's copies."""
    for pool, source, target in ((0, plan.copy_source, plan.copy_target), *map(astuple, plan.copies)):
        if source:
            yield pool, np.frombuffer(source, np.int32).tolist(), np.frombuffer(target, np.int32).tolist()


class Runner:
    def __init__(self, model: Decoder, rows: Rows, cache: KvCache, rope: RopeTable, bindings: Bindings) -> None:
        self.model, self.rows, self.cache, self.rope = model, rows, cache, rope
        self.sampler = Sampler(bindings)
        self._draw, self._gather, self._store = bindings(draw), bindings(gather_tokens), bindings(store_tokens)
        device, max_rows = rows.tokens.device, len(rows.live)
        self._staging = staging(STAGED_BYTES, device)
        # a graph may have rows for chunks beside as many that decode
        self._results = Results(max_rows + GraphKey(0, graphs.CHUNK_TOKENS[-1]).rows, device)
        self._graphs: Graphs | None = None
        self._capturing = bindings.capturing
        states = sum(more.is_state for more in rows.beside)
        self._tables = Tables(1 + len(rows.beside) - states, states)
        # the block of each group that padding writes: the last one
        self._scratch = [cache.blocks_of(pool) - 1 for pool in (0, *(more.group.pool for more in rows.beside))]

    def execute(self, plan: StepPlan) -> StepTokens:
        """Starts the plan's step. Raises AssertionError for a plan that does not fit the rows."""
        step = self.rows.apply(plan)
        for pool, source, target in copies_of(plan):
            self.cache.copy_blocks(source, target, pool)
        return self.run(step)

    @torch.inference_mode()
    def run(self, step: Step) -> StepTokens:
        """Starts a step of rows that are up to date; after an out-of-memory error it may be run again."""
        turn = self._results.next_turn()
        choice = graphs.choose(step, self._graphs.keys) if self._graphs is not None else None
        if choice is not None:
            places = self._replay(choice, step, turn)[step.samples]
        else:
            places = np.arange(np.count_nonzero(step.samples))
            if len(step.slots):
                self._run_eagerly(step, turn)
        self._staging.done()
        self.rows.commit(step)
        return self._results.taken(places)

    def _run_eagerly(self, step: Step, turn: int) -> None:
        rows, put = self.rows, self._staging.put
        batch = inputs.build(step, rows, put)
        ring = put(np.array([turn], np.int32))
        slots = step.slots[step.samples]
        context = (step.positions + step.counts)[step.samples]
        sampling = inputs.sampling_batch(slots, context, rows, put) if len(slots) else None
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
        self._note_blocks(batch.token_places, batch.token_rows, batch.positions, batch.beside)
        x = self.model(
            ids, self.rope.at(batch.positions), batch.kv_slots, batch.rows, self.cache, batch.outputs, batch.beside
        )
        if len(slots):
            sampled = self.sampler(self.model.logits(x), sampling, rows.penalties)
            self._store(rows.tokens, self._results.lines, batch.sampled_places, sampled, ring, None)

    def _replay(self, choice: Choice, step: Step, turn: int) -> npt.NDArray[np.int64]:
        """Returns the place among the graph's rows of each of the step's rows."""
        assert self._graphs is not None
        rows, put, key = self.rows, self._staging.put, choice.key
        arrays, staged = self._staging.columns(key, lambda: StepColumns.blank(key, self._tables))
        columns = StepColumns(*arrays)
        places = inputs.write_step(step, rows, choice, columns, self._scratch)
        columns.ring[0] = turn
        others = np.flatnonzero(step.samples & ~rows.is_plain[step.slots])
        if len(others):
            slots, context = step.slots[others], (step.positions + step.counts)[others]
            sampling = inputs.sampling_batch(slots, context, rows, put)
            index, targets = put(places[others]), put(slots * rows.tokens.shape[1] + context)
            ring = put(columns.ring.copy())
        self._staging.send()
        logits = self._graphs.replay(key, staged)
        if len(others):
            redrawn = self.sampler(logits.index_select(0, index), sampling, rows.penalties)
            self._store(rows.tokens, self._results.lines, targets, redrawn, ring, index)
        return places

    def _note_blocks(self, places: Tensor, token_rows: Tensor, positions: Tensor, beside: Sequence[GroupStep]) -> None:
        """Brings the block tables of the groups behind the first one up to date on the device."""
        rows = self.rows
        for more, (slots, _) in zip(rows.beside, beside, strict=True):
            if more.resident is not None:
                self._gather(rows.tokens, more.resident, places, token_rows, positions, slots, rows.block_tokens)

    def _forward(self, key: GraphKey, given: StepInputs) -> Tensor:
        """The whole step on the device, as it is captured. Returns the logits."""
        rows = self.rows
        places, positions, kv_slots = given.tokens[:3].unbind(0)
        sampled_places, seeds, output_index, outputs = given.draw.unbind(0)
        ids = self._gather(rows.tokens, rows.resident, places, given.token_rows, positions, kv_slots, rows.block_tokens)
        attention = given.attention_rows(rows, key)
        beside = given.beside(rows, attention)
        self._note_blocks(places, given.token_rows, positions, beside)
        wanted = outputs if key.chunk else None
        x = self.model(ids, self.rope.at(positions), kv_slots, attention, self.cache, wanted, beside)
        logits = self.model.logits(x)
        sampled = self._draw(logits, given.temperature, seeds, output_index)
        self._store(rows.tokens, self._results.lines, sampled_places, sampled, given.ring, None)
        return logits

    @torch.inference_mode()
    def capture(self, wanted: Sequence[GraphKey], report: Callable[[int, int], None]) -> None:
        """Captures steps of the layouts `wanted`; only the padding row and the last KV block are written."""
        captured = Graphs(self.rows.tokens.device, wanted, self._tables)
        none = np.zeros(0, np.int64)
        nobody = Step(none, none, none, none.astype(np.bool_))

        def padding(key: GraphKey) -> StepColumns:
            columns = StepColumns.blank(key, self._tables)
            inputs.write_step(nobody, self.rows, Choice(key, none, none), columns, self._scratch)
            return columns

        with self._capturing():
            captured.capture(padding, self._forward, report)
        self._graphs = captured
