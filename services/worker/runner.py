"""One step of the model: the calls of a step in order, nothing else. Called by the engine; owns no state itself.

apply the plan, copy blocks, build the batch, run the model, sample, store the tokens, commit. No call waits for the
device, so the next step may be started before this one's tokens are known. A step that a graph covers is one replay;
rows whose sampling asks for more are drawn again from its logits. Warm-up runs ordinary plans.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.protocol import RowFault, StepPlan
from services.worker import graphs, inputs
from services.worker.grammars import Grammars
from services.worker.graphs import RING, Choice, GraphKey, Graphs, StepColumns, StepInputs
from services.worker.held import Drawn, Held, HeldTokens
from services.worker.kernels.ops.draw import draw
from services.worker.kernels.ops.gather_tokens import gather_tokens
from services.worker.kernels.ops.store_tokens import store_tokens
from services.worker.kernels.registry import Bindings
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import RopeTable
from services.worker.sampler import Sampler
from services.worker.staging import staging
from services.worker.state import Ints, Rows, Step

STAGED_BYTES = 1 << 20  # a step of 16,384 tokens


class StepTokens:
    """The sampled tokens of one step: `places` [S] of int32 `line` in memory of the host, there after `event`."""

    faults: Sequence[RowFault] = ()

    def __init__(
        self, line: npt.NDArray[np.int32], places: npt.NDArray[np.int64], event: torch.cuda.Event | None
    ) -> None:
        self._line, self._places, self._event = line, places, event

    def settle(self) -> None:
        """There is nothing that waited for the step before."""

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


class Runner:
    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        cache: KvCache,
        rope: RopeTable,
        bindings: Bindings,
        grammars: Grammars | None = None,
    ) -> None:
        self.grammars = grammars or Grammars(rows.vocab_size, rows.eos_ids)
        self.model, self.rows, self.cache, self.rope = model, rows, cache, rope
        self.sampler = Sampler(bindings)
        self._draw, self._gather, self._store = bindings(draw), bindings(gather_tokens), bindings(store_tokens)
        device, max_rows = rows.tokens.device, len(rows.live)
        self._staging = staging(STAGED_BYTES, device)
        # a graph may have rows for chunks beside as many that decode
        self._results = Results(max_rows + GraphKey(0, graphs.CHUNK_TOKENS[-1]).rows, device)
        self._graphs: Graphs | None = None
        self._capturing = bindings.capturing
        self._held: deque[HeldTokens] = deque()  # whose tokens the rows' matchers do not have yet

    def apply(self, plan: StepPlan) -> Step:
        """Brings the rows up to a plan. Raises AssertionError for a plan that does not fit them."""
        self._settle_held()
        step = self.rows.apply(plan)
        self.grammars.apply(plan)
        return step

    def reset(self) -> None:
        """Forgets all rows."""
        self.rows.reset()
        self.grammars.reset()
        self._held.clear()

    def execute(self, plan: StepPlan) -> StepTokens | HeldTokens:
        """Starts the plan's step. Raises AssertionError for a plan that does not fit the rows."""
        step = self.apply(plan)
        if plan.copy_source:
            self.cache.copy_blocks(
                np.frombuffer(plan.copy_source, np.int32).tolist(), np.frombuffer(plan.copy_target, np.int32).tolist()
            )
        return self.run(step)

    @torch.inference_mode()
    def run(self, step: Step) -> StepTokens | HeldTokens:
        """Starts a step of rows that are up to date; after an out-of-memory error it may be run again."""
        self._settle_held()
        turn = self._results.next_turn()
        bound = self.grammars.bound(step)
        choice = graphs.choose(step, self._graphs.keys) if self._graphs is not None else None
        if choice is not None:
            places, logits = self._replay(choice, step, turn, bound)
        else:
            places, logits = np.arange(np.count_nonzero(step.samples)), None
            if len(step.slots):
                logits = self._run_eagerly(step, turn, bound)
        self._staging.done()
        if logits is None:
            self.rows.commit(step)
            return self._results.taken(places)
        slots, context = step.slots[bound], (step.positions + step.counts)[bound]
        self.rows.commit(step, slots)
        sampled = (np.cumsum(step.samples) - 1)[bound]
        held = Held(self.grammars.rows(slots), bound, sampled, slots, context, places[sampled], places, logits)
        self._held.append(HeldTokens(held, self._draw_held, self.grammars.feed))
        return self._held[-1]

    def _settle_held(self) -> None:
        """Before rows change or another step runs: what waited for the step before is drawn."""
        if self._held:
            self._held[-1].settle()  # those before it are settled
        while self._held and self._held[0].ready():
            self._held.popleft().tokens()

    @torch.inference_mode()
    def _draw_held(self, tokens: HeldTokens) -> Drawn:
        """Draws for the rows of the newest step that are under a grammar."""
        while self._held[0] is not tokens:
            self._held.popleft().tokens()  # the matchers take these
        held, rows, put = tokens.held, self.rows, self._staging.put
        masks = self.grammars.masks(held.rows, held.context - rows.num_prompt[held.slots])
        sampling = inputs.sampling_batch(held.slots, held.context, rows, put)
        targets, columns = put(held.slots * rows.tokens.shape[1] + held.context), put(held.columns)
        ring, mask = put(np.array([self._results.turn], np.int32)), put(masks.bits)
        self._staging.send()
        drawn = self.sampler(held.logits, sampling, rows.penalties, mask)
        self._store(rows.tokens, self._results.lines, targets, drawn, ring, columns)
        self._staging.done()
        rows.count(held.slots, held.context)
        faults = [RowFault(int(held.places[place]), message) for place, message in masks.faults.items()]
        return self._results.taken(held.line), faults

    def _run_eagerly(self, step: Step, turn: int, bound: Ints) -> Tensor | None:
        """Returns the logits [B, V] of the rows `bound`; None if there are none."""
        rows, put = self.rows, self._staging.put
        batch = inputs.build(step, rows, put)
        ring = put(np.array([turn], np.int32))
        slots = step.slots[step.samples]
        context = (step.positions + step.counts)[step.samples]
        sampling = inputs.sampling_batch(slots, context, rows, put) if len(slots) else None
        kept = put((np.cumsum(step.samples) - 1)[bound]) if len(bound) else None
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
            return None
        logits = self.model.logits(x)
        own = None if kept is None else logits.index_select(0, kept)  # a copy: the sampler writes
        sampled = self.sampler(logits, sampling, rows.penalties)
        self._store(rows.tokens, self._results.lines, batch.sampled_places, sampled, ring, None)
        return own

    def _replay(self, choice: Choice, step: Step, turn: int, bound: Ints) -> tuple[Ints, Tensor | None]:
        """The place among the graph's rows of each row that samples, and logits as `_run_eagerly`."""
        assert self._graphs is not None
        rows, put, key = self.rows, self._staging.put, choice.key
        arrays, staged = self._staging.columns(key, lambda: StepColumns.blank(key))
        columns = StepColumns(*arrays)
        places = inputs.write_step(step, rows, choice, columns, self._scratch)
        columns.ring[0] = turn
        special = step.samples & ~rows.is_plain[step.slots]
        special[bound] = False
        others = np.flatnonzero(special)
        if len(others):
            slots, context = step.slots[others], (step.positions + step.counts)[others]
            sampling = inputs.sampling_batch(slots, context, rows, put)
            index, targets = put(places[others]), put(slots * rows.tokens.shape[1] + context)
            ring = put(columns.ring.copy())
        kept = put(places[bound]) if len(bound) else None
        self._staging.send()
        logits = self._graphs.replay(key, staged)
        if len(others):
            redrawn = self.sampler(logits.index_select(0, index), sampling, rows.penalties)
            self._store(rows.tokens, self._results.lines, targets, redrawn, ring, index)
        return places[step.samples], None if kept is None else logits.index_select(0, kept)

    @property
    def _scratch(self) -> int:
        """The KV block that padding writes."""
        return self.cache.num_blocks - 1

    def _forward(self, key: GraphKey, given: StepInputs) -> Tensor:
        """The whole step on the device, as it is captured. Returns the logits."""
        rows = self.rows
        places, positions, kv_slots = given.tokens.unbind(0)
        sampled_places, seeds, output_index, outputs = given.draw.unbind(0)
        ids = self._gather(rows.tokens, rows.resident, places, given.token_rows, positions, kv_slots, rows.block_tokens)
        attention = given.attention_rows(rows, key)
        x = self.model(ids, self.rope.at(positions), kv_slots, attention, self.cache, outputs if key.chunk else None)
        logits = self.model.logits(x)
        sampled = self._draw(logits, given.temperature, seeds, output_index)
        self._store(rows.tokens, self._results.lines, sampled_places, sampled, given.ring, None)
        return logits

    @torch.inference_mode()
    def capture(self, wanted: Sequence[GraphKey], report: Callable[[int, int], None]) -> None:
        """Captures steps of the layouts `wanted`; only the padding row and the last KV block are written."""
        captured = Graphs(self.rows.tokens.device, wanted)
        none = np.zeros(0, np.int64)
        nobody = Step(none, none, none, none.astype(np.bool_))

        def padding(key: GraphKey) -> StepColumns:
            columns = StepColumns.blank(key)
            inputs.write_step(nobody, self.rows, Choice(key, none, none), columns, self._scratch)
            return columns

        with self._capturing():
            captured.capture(padding, self._forward, report)
        self._graphs = captured
