"""A step with drafts, around the model: rows become entries of one token each, and those that hold are kept.

Called by the runner. A row with k drafts is k + 1 decode rows of one token, which share its block table: they run in
the kernels, and in the captured layouts, of any decode step, so each token is computed as it is without drafts. After
the step `accept_drafts` keeps what holds and the proposer puts new drafts behind each row's newest token. Nothing of
that waits for the device.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.graphs import GraphKey, Sequel, StepColumns, StepInputs, StepOutputs
from services.worker.groups import GroupStep
from services.worker.kernels.ops.accept_drafts import Drawn, accept_drafts
from services.worker.kernels.ops.locate_rows import locate_rows
from services.worker.kernels.registry import Bindings
from services.worker.layers.kv_cache import KvCache
from services.worker.shortage import is_out_of_memory
from services.worker.state import Ints, Rows, Step

log = logging.getLogger("worker")


class Entries(NamedTuple):
    """A step's rows, those that draft spread out."""

    step: Step
    offsets: npt.NDArray[np.int32]  # by entry: its token's place behind the row's newest one; -1: samples nothing
    sizes: Ints  # entries of each row that samples


def spread(step: Step, rows: Rows) -> Entries:
    """On a CPU a drafting row has entries for the drafts that it has, elsewhere for those that the plan allows."""
    assert rows.drafts is not None
    offsets = np.where(step.samples, 0, -1).astype(np.int32)
    sizes = np.ones(np.count_nonzero(step.samples), np.int64)
    if not step.drafting:
        return Entries(step, offsets, sizes)
    counts = step.counts[: step.drafting]
    if rows.resident is None:
        counts = np.minimum(counts, 1 + rows.drafts.drafted.numpy()[step.slots[: step.drafting]])
    sizes[: step.drafting] = counts
    repeats = np.concatenate((counts, np.ones(len(step.slots) - step.drafting, np.int64)))
    ahead = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    slots, samples = np.repeat(step.slots, repeats), np.repeat(step.samples, repeats)
    positions, lengths = np.repeat(step.positions, repeats), np.repeat(step.counts, repeats)
    offsets = np.repeat(offsets, repeats)
    positions[: len(ahead)] += ahead
    offsets[: len(ahead)] = ahead
    lengths[: len(ahead)] = 1
    return Entries(Step(slots, positions, lengths, samples, len(ahead)), offsets, sizes)


def located(entries: Entries, rows: Rows) -> Entries:
    """Entries whose positions are exact, where no graph finds them on the device: waits for it."""
    step = entries.step
    if rows.drafts is None or rows.resident is None or not step.drafting:
        return entries
    known = rows.drafts.lengths.cpu().numpy()[step.slots[: step.drafting]]
    positions = step.positions.copy()
    positions[: step.drafting] = known - 1 + entries.offsets[: step.drafting]
    return entries._replace(step=step._replace(positions=positions))


class Seen(NamedTuple):
    """What a step has computed. T tokens, S entries."""

    drawn: Drawn
    ring: Tensor  # int32 [1]
    begins: Tensor  # int64 [3, B], rows that sample: token of their first entry (of T), slot, tokens its blocks hold
    computed: "Computed | None" = None  # for who reads it


class Computed(NamedTuple):
    """Of all T tokens of a step."""

    places: Tensor  # int64 [T], flat in Rows.tokens
    positions: Tensor  # int64 [T]
    groups: tuple[GroupStep, ...]
    hidden: Tensor  # [T, N], the residual stream behind the layers


def begins(slots: Ints, offsets: npt.NDArray[np.int32], tokens: Ints, rows: Rows) -> Ints:
    """Seen.begins. By entry (of S): slot, offset, and place among the step's tokens."""
    first = np.flatnonzero(offsets == 0)
    slots = slots[first]
    return np.stack((tokens[first], slots, rows.num_blocks[slots] * rows.block_tokens))


class Proposer(Protocol):
    """Puts drafts behind the newest token of each row (`Rows.tokens`), and their number into `DraftState.drafted`."""

    def __call__(self, rows: Rows, seen: Seen) -> None: ...


class Drafts:
    """The ops around a step. `propose`: after steps that may be followed by one with drafts.

    `reads`: the proposer wants `Seen.computed`; `caches`: its own, of the same blocks as the model's; `most_chunk`: it
    may be captured behind steps with at most so many tokens of chunks.
    """

    def __init__(
        self,
        bindings: Bindings,
        propose: Proposer,
        reads: bool = False,
        caches: Sequence[KvCache] = (),
        most_chunk: int = 1 << 30,
    ) -> None:
        self.propose, self.reads, self.caches, self.most_chunk = propose, reads, tuple(caches), most_chunk
        self._accept, self._locate = bindings(accept_drafts), bindings(locate_rows)

    def keep(self, rows: Rows, seen: Seen, lines: Tensor) -> None:
        """What holds goes into the rows; `lines`: of the results."""
        assert rows.drafts is not None
        self._accept(rows.tokens, rows.drafts.lengths, rows.drafts.held, lines, seen.drawn, seen.ring)

    def end(self, rows: Rows, seen: Seen, lines: Tensor, propose: bool) -> None:
        """Keeps what holds, and has new drafts proposed."""
        self.keep(rows, seen, lines)
        if not propose:
            return
        try:
            self.propose(rows, seen)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.warning("no memory to propose drafts")  # the step itself is done; what lies there will not hold

    def seen(self, rows: Rows, key: GraphKey, given: StepInputs, made: StepOutputs, num_rows: int) -> Seen:
        """Of a captured step, of which `num_rows` rows sample."""
        computed = None
        if self.reads:
            places, positions, kv_slots = given.tokens[:3].unbind(0)
            first = GroupStep(kv_slots, given.attention_rows(rows, key))
            computed = Computed(places, positions, (first, *given.beside(rows, first.rows)), made.hidden)
        drawn = Drawn(given.slots, given.context_lens, given.offsets, made.ids, made.drawn)
        return Seen(drawn, given.ring, given.begins[:, :num_rows], computed)

    def sequel(self, rows: Rows, lines: Tensor, key: GraphKey) -> Sequel | None:
        """What follows a captured step, to be captured, too; None: it does not go without the host."""

        def run(key: GraphKey, given: StepInputs, made: StepOutputs) -> None:
            seen = self.seen(rows, key, given, made, proposed(rows, key))
            self.keep(rows, seen, lines)
            self.propose(rows, seen)

        return run if key.chunk <= self.most_chunk else None

    def locate(self, rows: Rows, given: StepInputs, num_decode: int) -> None:
        """Before a step: its rows that decode, which come first, move to where they stand."""
        assert rows.drafts is not None and rows.resident is not None
        slots, offsets = given.slots[:num_decode], given.offsets[:num_decode]
        columns = given.tokens, given.draw, given.context_lens
        tables = [rows.resident, *(more.resident for more in rows.beside if more.resident is not None)]
        for line, table in enumerate(tables, 2):
            self._locate(rows.drafts.lengths, table, slots, offsets, *columns, rows.block_tokens, line)


def proposed(rows: Rows, key: GraphKey) -> int:
    """Rows for which a captured proposer has places: without chunks most have drafts, and so several entries each."""
    assert rows.drafts is not None
    return key.rows if key.chunk else min(-(-2 * key.decode // (1 + rows.drafts.most)), key.decode)


def write_begins(first: Ints, rows: Rows, columns: StepColumns) -> None:
    """first: `begins` of the step's rows. Places that these leave free are the padding row's, which has no blocks."""
    columns.begins[:] = np.array([[0], [rows.padding_row], [0]])
    columns.begins[:, : first.shape[1]] = first


def follows_drafts(step: Step) -> bool:
    """Whether the next step of these rows may have drafts: not where the plan has none though it could."""
    return step.drafting > 0 or not step.samples.all() or bool((step.counts > 1).any())
