"""One step of the model: the calls of a step in order, nothing else. Called by the engine; owns no state itself.

apply the plan, copy blocks, build the batch, run the model, sample, store the tokens, commit. No call waits for the
device, so the next step may be started before this one's tokens are known. A step that a graph covers is one replay;
rows whose sampling asks for more are drawn again from its logits. Warm-up runs ordinary plans.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import astuple
from torch import Tensor

from common.logprobs import StepLogprobs
from common.protocol import RowFault, StepPlan
from services.worker import graphs, inputs
from services.worker.drafts import (
    Computed,
    Drafts,
    Entries,
    Seen,
    begins,
    follows_drafts,
    located,
    proposed,
    spread,
    write_begins,
)
from services.worker.grammars import Bits, Grammars
from services.worker.graphs import RING, Choice, GraphKey, Graphs, Sequel, StepColumns, StepInputs, StepOutputs, Tables
from services.worker.groups import GroupStep
from services.worker.held import Held, HeldSteps, HeldTokens
from services.worker.kernels.ops.accept_drafts import Drawn
from services.worker.kernels.ops.draw import draw
from services.worker.kernels.ops.gather_tokens import gather_tokens
from services.worker.kernels.ops.store_tokens import store_tokens
from services.worker.kernels.registry import Bindings
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import RopeTable
from services.worker.reports import Reporter, StepReports, reads_all
from services.worker.sampler import Sampler
from services.worker.shortage import is_out_of_memory
from services.worker.staging import staging
from services.worker.state import Ints, Rows, Step

log = logging.getLogger("worker")

STAGED_BYTES = 1 << 20  # a step of 16,384 tokens
NO_OFFSETS, NO_SIZES = np.zeros(0, np.int32), np.zeros(0, np.int64)


class StepTokens:
    """The sampled tokens of one step: `places` [S] of int32 `line` in memory of the host, there after `event`."""

    faults: Sequence[RowFault] = ()

    def __init__(
        self,
        line: npt.NDArray[np.int32],
        places: npt.NDArray[np.int64],
        event: torch.cuda.Event | None,
        sizes: npt.NDArray[np.int64] | None = None,
        reports: StepReports | None = None,
    ) -> None:
        """`sizes`: entries of each row in a step with drafts; the second half of the line then says which are kept."""
        self._line, self._places, self._event, self._sizes = line, places, event, sizes
        self._reports = reports

    def settle(self) -> None:
        """There is nothing that waited for the step before."""

    def ready(self) -> bool:
        """Whether `tokens` would return without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def tokens(self) -> bytes:
        """_i32 sampled tokens in the plan's order of rows; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._line[self._places if self._sizes is None else self._places[self._kept()]].tobytes()

    def counts(self) -> tuple[bytes, bytes]:
        """With `tokens`: one byte per row, how many it has, and how many drafts were tried; empty without drafts."""
        if self._sizes is None:
            return b"", b""
        starts = np.cumsum(self._sizes) - self._sizes
        kept = np.add.reduceat(self._kept(), starts, dtype=np.int64)
        return kept.astype(np.uint8).tobytes(), (self._sizes - 1).astype(np.uint8).tobytes()

    def logprobs(self) -> StepLogprobs | None:
        """With `tokens`."""
        if self._reports is None:
            return None
        return self._reports.read(None if self._sizes is None else self._kept())

    def _kept(self) -> npt.NDArray[np.bool_]:
        kept: npt.NDArray[np.bool_] = self._line[len(self._line) // 2 + self._places] != 0
        return kept


class Results:
    """Lines of memory that the device writes sampled tokens to and the host reads; one per step, used by turns.

    Beside them, where rows want them, log-probabilities.
    """

    def __init__(self, width: int, device: torch.device, reporter: Reporter) -> None:
        on_gpu = device.type != "cpu"
        self.lines = torch.zeros(RING, width, dtype=torch.int32, pin_memory=on_gpu)
        self.turn, self.reporter = 0, reporter
        self._host = self.lines.numpy()
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        self._events = [torch.cuda.Event() for _ in range(RING)] if on_gpu else []  # type: ignore[no-untyped-call]

    def next_turn(self) -> int:
        self.turn = (self.turn + 1) % RING
        self.reporter.start()
        return self.turn

    def taken(self, places: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64] | None = None) -> StepTokens:
        """This turn's tokens at `places`, when all that was launched so far is done."""
        line, reports = self._host[self.turn], self.reporter.taken()
        if self._stream is None:
            return StepTokens(line.copy(), places, None, sizes, reports)
        event = self._events[self.turn]
        event.record(self._stream)
        return StepTokens(line, places, event, sizes, reports)


def copies_of(plan: StepPlan) -> Iterator[tuple[int, list[int], list[int]]]:
    """Pool, source and target blocks of each of the plan's copies."""
    for pool, source, target in ((0, plan.copy_source, plan.copy_target), *map(astuple, plan.copies)):
        if source:
            yield pool, np.frombuffer(source, np.int32).tolist(), np.frombuffer(target, np.int32).tolist()


class Runner:
    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        cache: KvCache,
        rope: RopeTable,
        bindings: Bindings,
        drafts: Drafts | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`drafts`: with rows that have a DraftState, and only then."""
        self.model, self.rows, self.cache, self.rope = model, rows, cache, rope
        self.sampler = Sampler(bindings)
        self._draw, self._gather, self._store = bindings(draw), bindings(gather_tokens), bindings(store_tokens)
        device, max_rows = rows.tokens.device, len(rows.live)
        self._staging = staging(STAGED_BYTES, device)
        # a graph may have rows for chunks beside as many that decode
        width = max_rows + GraphKey(0, graphs.CHUNK_TOKENS[-1]).rows
        if rows.drafts is not None:
            width = 2 * (width + max_rows * rows.drafts.most)
        self._results = Results(width, device, Reporter(bindings))
        self._graphs: Graphs | None = None
        self._capturing = bindings.capturing
        # the block of each group that padding writes: the last one
        self._scratch = [cache.blocks_of(pool) - 1 for pool in (0, *(more.group.pool for more in rows.beside))]
        self._drafts = drafts
        self.held = HeldSteps(grammars or Grammars(rows.vocab_size, ()), rows, self._draw_held)

    def apply(self, plan: StepPlan) -> Step:
        """Brings the rows up to a plan. Raises AssertionError for a plan that does not fit them."""
        self.held.settle()
        step = self.rows.apply(plan)
        self.held.grammars.apply(plan)
        return step

    def reset(self) -> None:
        """Forgets all rows."""
        self.rows.reset()
        self.held.reset()

    def execute(self, plan: StepPlan) -> StepTokens | HeldTokens:
        """Starts the plan's step. Raises AssertionError for a plan that does not fit the rows."""
        step = self.apply(plan)
        for pool, source, target in copies_of(plan):
            self.copy_blocks(source, target, pool)
        return self.run(step)

    def copy_blocks(self, source: Sequence[int], target: Sequence[int], pool: int = 0) -> None:
        """In the model's cache, and in that of a model that proposes drafts: its blocks are those of the first pool."""
        others = self._drafts.caches if self._drafts is not None and not pool else ()
        for cache in (self.cache, *others):
            cache.copy_blocks(source, target, pool)

    @torch.inference_mode()
    def run(self, step: Step) -> StepTokens | HeldTokens:
        """Starts a step of rows that are up to date; after an out-of-memory error it may be run again."""
        self.held.settle()
        turn = self._results.next_turn()
        entries = spread(step, self.rows) if self._drafts is not None else Entries(step, NO_OFFSETS, NO_SIZES)
        bound = self.held.grammars.bound(entries.step)
        keys = self._graphs.keys if self._graphs is not None and not reads_all(step, self.rows) else ()
        choice = graphs.choose(entries.step, keys)
        if choice is not None:
            places, logits = self._replay(choice, entries, turn, bound)
        else:
            places, logits = np.arange(np.count_nonzero(entries.step.samples)), None
            if len(step.slots):
                logits = self._run_eagerly(located(entries, self.rows), turn, bound, step.drafting)
        self._staging.done()
        sizes = entries.sizes if step.drafting else None
        if logits is None:
            self.rows.commit(step)
            return self._results.taken(places, sizes)
        return self.held.add(step, entries.step, bound, places, sizes, logits)

    @torch.inference_mode()
    def _draw_held(self, held: Held, bits: Bits) -> StepTokens:
        """Draws for rows of the newest step that are under a grammar."""
        rows, put = self.rows, self._staging.put
        sampling = inputs.sampling_batch(held.slots, held.context, rows, put)
        targets, columns = put(held.slots * rows.tokens.shape[1] + held.context), put(held.columns)
        ring, mask = put(np.array([self._results.turn], np.int32)), put(bits)
        self._staging.send()
        drawn = self.sampler(held.logits, sampling, rows.penalties, mask)
        self._store(rows.tokens, self._results.lines, targets, drawn, ring, columns)
        self._results.reporter.settled(drawn)
        self._staging.done()
        rows.count(held.slots, held.context)
        return self._results.taken(held.line, held.sizes)

    def _run_eagerly(self, entries: Entries, turn: int, bound: Ints, drafting: int) -> Tensor | None:
        """Returns the logits [B, V] of the entries `bound`; None if there are none. drafting: the plan's."""
        rows, put, step = self.rows, self._staging.put, entries.step
        batch = inputs.build(step, rows, put, entries.offsets if self._drafts is not None else None)
        ring = put(np.array([turn], np.int32))
        slots = step.slots[step.samples]
        context = (step.positions + step.counts)[step.samples]
        sampling = inputs.sampling_batch(slots, context, rows, put) if len(slots) else None
        kept = put((np.cumsum(step.samples) - 1)[bound]) if len(bound) else None
        wanted = self._results.reporter.wanted(slots, np.arange(len(slots)), rows, put)
        parts = self._results.reporter.parts(step, drafting, rows, put)
        pooled = self._results.reporter.pooler.parts(step, rows, put)
        if self._drafts is not None:
            offsets = entries.offsets[step.samples]
            placed = [put(column.astype(np.int32)) for column in (slots, context, offsets)]
            first = put(begins(slots, offsets, (np.cumsum(step.counts) - 1)[step.samples], rows))
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
        reads = self._drafts is not None and self._drafts.reads
        every = reads or bool(parts) or pooled is not None  # of the hidden states is wanted
        only = None if every else batch.outputs
        x = self.model(ids, self.rope.at(batch.positions), batch.kv_slots, batch.rows, self.cache, only, batch.beside)
        for part in parts:
            self._results.reporter.prompt(part, x, self.model.logits, rows.tokens)
        self._results.reporter.pooler.pool(pooled, x, self.model.hidden)
        if not len(slots) and not reads:
            return None
        own, sampled = None, ids[:0]
        if len(slots):
            logits = self.model.logits(x.index_select(0, batch.outputs) if every and batch.outputs is not None else x)
            own = None if kept is None else logits.index_select(0, kept)  # a copy: the sampler writes
            raw = wanted.own(logits) if wanted is not None else None
            sampled = self.sampler(logits, sampling, rows.penalties)
            if wanted is not None and raw is not None:
                self._results.reporter.drawn(wanted, raw, sampled, kept)
        if self._drafts is None:
            self._store(rows.tokens, self._results.lines, batch.sampled_places, sampled, ring, None)
            return own
        computed = None
        if reads:
            groups = GroupStep(batch.kv_slots, batch.rows), *batch.beside
            computed = Computed(batch.token_places, batch.positions, groups, x)
        drawn = Drawn(placed[0], placed[1], placed[2], ids, sampled)
        self._keep(Seen(drawn, ring, first, computed), follows_drafts(step))
        return own

    def _keep(self, seen: Seen, propose: bool) -> None:
        assert self._drafts is not None
        self._drafts.keep(self.rows, seen, self._results.lines)
        if not propose:
            return
        try:
            self._drafts.propose(self.rows, seen)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.warning("no memory to propose drafts")  # the step itself is done; what lies there will not hold

    def _replay(self, choice: Choice, entries: Entries, turn: int, bound: Ints) -> tuple[Ints, Tensor | None]:
        """The place among the graph's rows of each entry that samples, and logits as `_run_eagerly`."""
        assert self._graphs is not None
        rows, put, key, step = self.rows, self._staging.put, choice.key, entries.step
        arrays, staged = self._staging.columns(key, lambda: StepColumns.blank(key, Tables.of(rows)))
        columns = StepColumns(*arrays)
        places = inputs.write_step(step, rows, choice, columns, self._scratch)
        columns.ring[0] = turn
        if self._drafts is not None:
            columns.offsets[places] = entries.offsets
            tokens = columns.draw[3] if key.chunk else np.arange(key.rows)
            first = begins(columns.slots.astype(np.int64), columns.offsets, tokens, rows)
            write_begins(first, rows, columns)
        special = step.samples & ~rows.is_plain[step.slots]
        special[bound] = False
        others = np.flatnonzero(special)
        if len(others):
            slots, context = step.slots[others], (step.positions + step.counts)[others]
            sampling = inputs.sampling_batch(slots, context, rows, put)
            index, targets = put(places[others]), put(slots * rows.tokens.shape[1] + context)
            ring = put(columns.ring.copy())
        kept = put(places[bound]) if len(bound) else None
        wanted = self._results.reporter.wanted(step.slots[step.samples], places[step.samples], rows, put)
        last = columns.draw[3][places] if self._drafts is not None and self._drafts.reads else places
        pooled = self._results.reporter.pooler.parts(step, rows, put, last)
        self._staging.send()
        given, made = self._graphs.replay(key, staged)
        if len(others):
            if self._drafts is not None and sampling is not None and sampling.draw is not None:
                draw = replace(sampling.draw, positions=given.draw[2].index_select(0, index))
                sampling = replace(sampling, draw=draw)
            redrawn = self.sampler(made.logits.index_select(0, index), sampling, rows.penalties)
            if self._drafts is None:
                self._store(rows.tokens, self._results.lines, targets, redrawn, ring, index)
            if self._drafts is not None or wanted is not None:
                made.drawn.index_copy_(0, index, redrawn)
        if wanted is not None:
            self._results.reporter.drawn(wanted, wanted.own(made.logits), made.drawn, kept)
        self._results.reporter.pooler.pool(pooled, made.hidden, self.model.hidden)
        if self._drafts is not None:
            num_rows, propose = first.shape[1], follows_drafts(step)
            if not (propose and num_rows <= proposed(rows, key) and self._graphs.follow(key)):
                self._keep(self._drafts.seen(rows, key, given, made, num_rows), propose)
        return places[step.samples], None if kept is None else made.logits.index_select(0, kept)

    def _note_blocks(self, places: Tensor, token_rows: Tensor, positions: Tensor, beside: Sequence[GroupStep]) -> None:
        """Brings the block tables of the groups behind the first one up to date on the device."""
        rows = self.rows
        for more, (slots, _) in zip(rows.beside, beside, strict=True):
            if more.resident is not None:
                self._gather(rows.tokens, more.resident, places, token_rows, positions, slots, rows.block_tokens)

    def _forward(self, key: GraphKey, given: StepInputs) -> StepOutputs:
        """The whole step on the device, as it is captured; drafts are kept and proposed behind it, in its sequel."""
        rows = self.rows
        if self._drafts is not None:
            self._drafts.locate(rows, given, key.decode)
        places, positions, kv_slots = given.tokens[:3].unbind(0)
        sampled_places, seeds, output_index, outputs = given.draw.unbind(0)
        ids = self._gather(rows.tokens, rows.resident, places, given.token_rows, positions, kv_slots, rows.block_tokens)
        attention = given.attention_rows(rows, key)
        beside = given.beside(rows, attention)
        self._note_blocks(places, given.token_rows, positions, beside)
        reads = self._drafts is not None and self._drafts.reads
        wanted = outputs if key.chunk and not reads else None
        x = self.model(ids, self.rope.at(positions), kv_slots, attention, self.cache, wanted, beside)
        logits = self.model.logits(x.index_select(0, outputs) if key.chunk and reads else x)
        sampled = self._draw(logits, given.temperature, seeds, output_index)
        if self._drafts is None:
            self._store(rows.tokens, self._results.lines, sampled_places, sampled, given.ring, None)
        return StepOutputs(logits, sampled, ids, x)

    @torch.inference_mode()
    def capture(self, wanted: Sequence[GraphKey], report: Callable[[int, int], None]) -> None:
        """Captures steps of the layouts `wanted`; only the padding row and the last KV block are written."""
        captured = Graphs(self.rows.tokens.device, wanted, Tables.of(self.rows))
        none = np.zeros(0, np.int64)
        nobody = Step(none, none, none, none.astype(np.bool_))

        def padding(key: GraphKey) -> StepColumns:
            columns = StepColumns.blank(key, Tables.of(self.rows))
            inputs.write_step(nobody, self.rows, Choice(key, none, none), columns, self._scratch)
            return columns

        def sequel(key: GraphKey) -> Sequel | None:
            return self._drafts.sequel(self.rows, self._results.lines, key) if self._drafts is not None else None

        with self._capturing():
            captured.capture(padding, self._forward, report, sequel)
        self._graphs = captured
