"""One step of the model: the calls of a step in order, nothing else. Called by the engine; owns no state itself.

apply the plan, copy blocks, build the batch, run the model, sample, store the tokens, commit. No call waits for the
device, so the next step may be started before this one's tokens are known. A step that a graph covers is one replay;
rows whose sampling asks for more are drawn again from its logits. Warm-up runs ordinary plans.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from msgspec.structs import astuple
from torch import Tensor

from common.protocol import StepPlan
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
from services.worker.graphs import (
    Choice,
    GraphKey,
    Graphs,
    Sequel,
    StepColumns,
    StepInputs,
    StepOutputs,
)
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
from services.worker.reports import Reporter
from services.worker.results import Results, StepTokens
from services.worker.sampler import Sampler
from services.worker.seats import Seated, Seating
from services.worker.staging import staging
from services.worker.state import Ints, Rows, Step

STAGED_BYTES = 1 << 20  # a step of 16,384 tokens
NO_OFFSETS, NO_SIZES = np.zeros(0, np.int32), np.zeros(0, np.int64)


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
        # what padding writes: the last block of each group
        scratch = [cache.blocks_of(pool) - 1 for pool in (0, *(more.group.pool for more in rows.beside))]
        self._seating = Seating(rows, scratch)
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
        self._staging.begin(turn)
        entries = spread(step, self.rows) if self._drafts is not None else Entries(step, NO_OFFSETS, NO_SIZES)
        keys = self._graphs.keys if self._graphs is not None else ()
        seated = self._seating.seated(entries.step, keys, self.held.grammars.bound)
        if seated is not None:
            bound, drawn = seated.bound, seated.seats.drawn
            logits = self._replay(seated, entries, turn)
        else:
            bound, logits = self.held.grammars.bound(entries.step), None
            drawn = np.arange(np.count_nonzero(entries.step.samples))
            if len(step.slots):
                logits = self._run_eagerly(located(entries, self.rows), turn, bound, step.drafting)
        sizes = entries.sizes if step.drafting else None
        if logits is None:
            self.rows.commit(step)
            return self._results.taken(drawn, sizes)
        return self.held.add(step, entries.step, bound, drawn, sizes, logits)

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
        self._drafts.end(rows, Seen(drawn, ring, first, computed), self._results.lines, follows_drafts(step))
        return own

    def _replay(self, seated: Seated, entries: Entries, turn: int) -> Tensor | None:
        """Logits as `_run_eagerly`."""
        assert self._graphs is not None
        seats, columns = seated.seats, seated.seats.inputs.columns
        seats.move(entries.step, self.rows)
        columns.ring[0] = turn
        if seated.plain:
            staged = self._staging.put(seats.inputs.buffer)
            self._staging.send()
            self._graphs.replay(seats.key, staged)
            return None
        return self._replay_more(seated, entries)

    def _replay_more(self, seated: Seated, entries: Entries) -> Tensor | None:
        """A replay, and what some rows want besides. Logits as `_run_eagerly`."""
        assert self._graphs is not None
        rows, put, step, seats, others = self.rows, self._staging.put, entries.step, seated.seats, seated.others
        key, columns = seats.key, seats.inputs.columns
        if self._drafts is not None:
            columns.offsets[seats.places] = entries.offsets
            tokens = columns.draw[3] if key.chunk else np.arange(key.rows)
            first = begins(columns.slots.astype(np.int64), columns.offsets, tokens, rows)
            write_begins(first, rows, columns)
        staged = put(seats.inputs.buffer)
        sampling = None
        if len(others):
            slots, context = step.slots[others], (step.positions + step.counts)[others]
            sampling = inputs.sampling_batch(slots, context, rows, put)
            index, targets = put(seats.places[others]), put(slots * rows.tokens.shape[1] + context)
            ring = put(columns.ring)
        kept = put(seats.places[seated.bound]) if len(seated.bound) else None
        wanted = self._results.reporter.wanted(seats.sampled, seats.drawn, rows, put)
        last = columns.draw[3][seats.places] if self._drafts is not None and self._drafts.reads else seats.places
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
                seen = self._drafts.seen(rows, key, given, made, num_rows)
                self._drafts.end(rows, seen, self._results.lines, propose)
        return None if kept is None else made.logits.index_select(0, kept)

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
        captured = Graphs(self.rows.tokens.device, wanted, self._seating.tables)
        none = np.zeros(0, np.int64)
        nobody = Step(none, none, none, none.astype(np.bool_))

        def padding(key: GraphKey) -> StepColumns:
            return self._seating.seat(nobody, Choice(key, none, none)).inputs.columns

        def sequel(key: GraphKey) -> Sequel | None:
            return self._drafts.sequel(self.rows, self._results.lines, key) if self._drafts is not None else None

        with self._capturing():
            captured.capture(padding, self._forward, report, sequel)
        self._graphs = captured
