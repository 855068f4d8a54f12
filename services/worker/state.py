"""The worker's rows: one per running sequence. Owner: `Rows.apply` (start of a step) and `Rows.commit` (end).

Token ids live on the device, since sampled ones are appended there and the host need not know them; everything a plan
decides (lengths, block tables, sampling parameters) lives on the host. A GPU has the block tables too (`resident`): a
new row's are written here, later blocks by the step that first uses them. The worker decides nothing: a plan that does
not fit the rows is a broken invariant and ends the process.
"""

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.logprobs import Report
from common.protocol import KvGroup, RowStart, RowTable, Sampling, StepPlan
from services.worker import memory
from services.worker.block_tables import BlockTables, GroupTables, upload_tables
from services.worker.draft_state import DraftState, scatter

Ints = npt.NDArray[np.int64]

SAMPLING = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("top_k", np.int64),
        ("seed", np.int64),
        ("min_tokens", np.int64),
    ]
)


class Step(NamedTuple):
    """A plan's rows as int64 columns [R]; `samples` is bool [R].

    The first `drafting` rows begin with their newest token, wherever that is: on a GPU positions are only the highest.
    A plan for the rows of the plan before has that one's very arrays of slots, counts and samples (`is`): what is
    decided for them holds as long.
    """

    slots: Ints
    positions: Ints
    counts: Ints
    samples: npt.NDArray[np.bool_]
    drafting: int = 0


class Edits(NamedTuple):
    """Logit changes by token id that only some rows have; ids outside the vocabulary are left out."""

    bias_ids: Ints
    bias_values: npt.NDArray[np.float32]
    end_ids: Ints  # tokens that may not come before min_tokens
    allowed: Ints  # empty: all
    banned: tuple[tuple[int, ...], ...]  # tokens that may not come in this order


class PenaltyCounts:
    """Which tokens a row has seen, for rows with penalties; int32 and bool [max_rows, V], made when first needed."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.in_output = memory.zeros((max_rows, vocab_size), torch.int32, device)
        self.in_prompt = memory.zeros((max_rows, vocab_size), torch.bool, device)

    def start(self, slot: int, tokens: Tensor, num_prompt: int) -> None:
        """tokens: int64 [n], the prompt and the output so far."""
        self.in_prompt[slot] = False
        self.in_prompt[slot, tokens[:num_prompt]] = True
        self.in_output[slot] = 0
        output = tokens[num_prompt:]
        self.in_output[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def count(self, tokens: Tensor, slots: Ints, places: Ints) -> None:
        """tokens: int32 [rows, L], those of all rows; what is new of each slot [n] is at its place [n]."""
        sampled = tokens.view(-1).index_select(0, torch.from_numpy(slots * tokens.shape[1] + places).to(tokens.device))
        flat = torch.from_numpy(slots * self.in_output.shape[1]).to(tokens.device) + sampled
        self.in_output.view(-1).index_add_(0, flat, torch.ones_like(sampled))


def has_penalty(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


class Rows:
    """`length` counts a row's tokens, those on the way from the device included; `computed` those with KV."""

    def __init__(
        self,
        shape: memory.Shape,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        device: torch.device,
        groups: Sequence[KvGroup] = (),
        drafts: DraftState | None = None,
    ) -> None:
        """`groups`: as in ModelFacts."""
        max_rows, max_len, block_tokens = shape
        self.drafts = drafts
        self.block_tokens = block_tokens
        self._vocabulary = vocab_size, eos_ids
        # One column more than max_len: a row that has reached it may still draw a token that nobody will run.
        # One row more than there are slots: what pads a batch reads and writes there.
        self.tokens = memory.zeros((max_rows + 1, max_len + 1 + (drafts.most if drafts else 0)), torch.int32, device)
        self.tables_of = GroupTables.of(groups, max_rows, -(-max_len // block_tokens), device)
        self._before: tuple[object, Step] | None = None  # the last plan's columns but for positions, and its step
        self.live = np.zeros(max_rows, np.bool_)
        self.length = np.zeros(max_rows, np.int64)
        self.computed = np.zeros(max_rows, np.int64)
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.sampling = np.zeros(max_rows, SAMPLING)
        self.is_plain = np.zeros(max_rows, np.bool_)  # greedy, or drawn by temperature alone
        self.edits: dict[int, Edits] = {}
        self.reports: dict[int, Report] = {}  # of rows that want log-probabilities, or a vector
        self.penalties: PenaltyCounts | None = None

    @property
    def vocab_size(self) -> int:
        return self._vocabulary[0]

    @property
    def first(self) -> BlockTables:
        return self.tables_of.first

    @property
    def beside(self) -> list[BlockTables]:
        return self.tables_of.beside

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """Of the first group."""
        return self.first.tables

    @property
    def num_blocks(self) -> Ints:
        """Of the first group, by slot."""
        return self.first.num_blocks

    @property
    def resident(self) -> Tensor | None:
        return self.first.resident

    @property
    def has_states(self) -> bool:
        return any(more.is_state for more in self.beside)

    @property
    def max_len(self) -> int:
        return self.tokens.shape[1] - 1 - (self.drafts.most if self.drafts is not None else 0)

    @property
    def padding_row(self) -> int:
        return len(self.live)

    def reset(self) -> None:
        """Forgets all rows."""
        self._before = None
        self.live[:] = False
        self.edits.clear()
        self.reports.clear()

    def apply(self, plan: StepPlan) -> Step:
        """Applies removed, added and grown in this order and checks the step's rows against the result."""
        for slot in np.frombuffer(plan.removed, np.int32).tolist():
            assert self.live[slot], f"step {plan.step} removes slot {slot}, which holds no row"
            self.live[slot] = False
            self.edits.pop(slot, None)
            self.reports.pop(slot, None)
        for row in plan.added:
            self._start(row)
        if plan.added:
            self._upload(plan.added)
        if plan.removed or plan.added:
            self._before = None
        # only the device knows which of a drafting row's blocks the step uses first
        self.tables_of.grow(plan, upload=self.drafts is not None)
        step = self._step(plan)
        if self.drafts is not None:
            self._locate(step)
        self._check(plan.step, step)
        return step

    def _step(self, plan: StepPlan) -> Step:
        positions = np.frombuffer(plan.positions, np.int32).astype(np.int64)
        columns = plan.slots, plan.counts, plan.samples, plan.drafting
        if self._before is not None and self._before[0] == columns:
            known = self._before[1]
            return Step(known.slots, positions, known.counts, known.samples, known.drafting)
        slots, counts = (np.frombuffer(column, np.int32).astype(np.int64) for column in (plan.slots, plan.counts))
        assert self.live[slots].all(), f"step {plan.step}: a slot holds no row"
        assert len(set(slots.tolist())) == len(slots), f"step {plan.step}: a slot has two rows"
        assert (counts > 0).all(), f"step {plan.step}: a row without tokens"
        step = Step(slots, positions, counts, np.frombuffer(plan.samples, np.bool_), plan.drafting)
        assert step.samples[: step.drafting].all(), f"step {plan.step}: a row drafts without a token"
        self._before = columns, step
        return step

    def _locate(self, step: Step) -> None:
        """Brings counts and positions together: on a CPU those of drafting rows are exact, elsewhere the highest."""
        assert self.drafts is not None
        adrift = self.drafts.adrift
        first, others = step.slots[: step.drafting], step.slots[step.drafting :]
        assert (step.positions[: step.drafting] >= self.computed[first]).all() or self.resident is not None
        if self.resident is None:
            step.positions[: step.drafting] = self.computed[first]
            return
        known = others[adrift[others]]
        self.computed[known] = step.positions[step.drafting :][adrift[others]]
        self.computed[first] = step.positions[: step.drafting]
        for slots in (known, first):
            self.length[slots] = self.computed[slots] + 1
        adrift[known], adrift[first] = False, True

    def commit(self, step: Step, held: Ints | None = None) -> None:
        """Counts what the step has computed, and what it has drawn, which is in `tokens` already.

        held: slots whose tokens are not; they are counted by `count`.
        """
        self.computed[step.slots] += step.counts
        slots = step.slots[step.samples]
        if self.penalties is not None:
            drawn = slots if held is None else slots[~np.isin(slots, held)]
            self.count(drawn, self.length[drawn])
        self.length[slots] += 1
        if self.drafts is not None and len(slots):
            first = step.slots[: step.drafting]
            self.length[first] += step.counts[: step.drafting] - 1
            if self.resident is None:
                self.length[slots] = self.drafts.lengths.numpy()[slots]
                self.computed[slots] = self.length[slots] - 1

    def give_up(self, step: Step) -> None:
        """Counts a step that did not run; its rows are about to be removed."""
        if self.drafts is not None:
            slots = torch.from_numpy(step.slots[step.samples]).to(self.tokens.device)
            self.drafts.lengths[slots] = torch.from_numpy(self.length[step.slots[step.samples]] + 1).to(slots.device)
        self.commit(step)

    def count(self, slots: Ints, places: Ints) -> None:
        """The tokens at these places of these slots are output, for penalties."""
        if self.penalties is not None and len(slots):
            self.penalties.count(self.tokens, slots, places)

    def _start(self, row: RowStart) -> None:
        slot = row.slot
        tokens = np.frombuffer(row.tokens, np.int32)
        assert not self.live[slot], f"slot {slot} is taken twice"
        assert 0 < row.num_prompt <= len(tokens) <= self.max_len, (row.num_prompt, len(tokens), self.max_len)
        assert 0 <= row.computed < len(tokens), (row.computed, len(tokens))
        assert tokens.min() >= 0 and tokens.max() < self.vocab_size, "a token id is outside the vocabulary"
        self.live[slot] = True
        self.length[slot], self.computed[slot], self.num_prompt[slot] = len(tokens), row.computed, row.num_prompt
        self.first.start(slot, RowTable(row.first, row.blocks))
        for more, table in zip(self.beside, row.tables, strict=True):
            more.start(slot, table)
        self._start_sampling(slot, row.sampling)
        if row.sampling.report != Report():
            self.reports[slot] = row.sampling.report

    def _upload(self, added: Sequence[RowStart]) -> None:
        """Token ids and block tables of new rows to the device, all rows in one copy each."""
        row_len = self.tokens.shape[1]
        tokens = [np.frombuffer(row.tokens, np.int32) for row in added]
        places = [np.arange(len(ids)) + row.slot * row_len for row, ids in zip(added, tokens, strict=True)]
        scatter(self.tokens, places, tokens)
        if self.first.resident is not None:
            upload_tables(self.first.resident, added, [RowTable(row.first, row.blocks) for row in added])
        for idx, more in enumerate(self.beside):
            if more.resident is not None:
                upload_tables(more.resident, added, [row.tables[idx] for row in added])
        if self.drafts is not None:
            self.drafts.start([row.slot for row in added], [len(ids) for ids in tokens])
        for row, ids in zip(added, tokens, strict=True):
            if has_penalty(row.sampling):
                if self.penalties is None:
                    self.penalties = PenaltyCounts(len(self.live), self.vocab_size, self.tokens.device)
                self.penalties.start(row.slot, self.tokens[row.slot, : len(ids)].long(), row.num_prompt)

    def _start_sampling(self, slot: int, sampling: Sampling) -> None:
        self.sampling[slot] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
            min(max(sampling.top_k, 0), self.vocab_size) % self.vocab_size,
            np.uint64(sampling.seed % 2**64).astype(np.int64),
            sampling.min_tokens,
        )
        ends = (
            [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._vocabulary[1])]
            if sampling.min_tokens and sampling.grammar is None  # a grammar's mask knows when an end may come
            else []
        )
        bias = [(token, value) for token, value in sampling.logit_bias if 0 <= token < self.vocab_size]
        ends = [token for token in dict.fromkeys(ends) if 0 <= token < self.vocab_size]
        filtered = sampling.temperature > 0 and (
            self.sampling["top_k"][slot] != 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        )
        special = sampling.grammar is not None or has_penalty(sampling)
        edited = bool(bias or ends or sampling.words.allowed or sampling.words.banned)
        self.is_plain[slot] = not (filtered or edited or special)
        if edited:
            self.edits[slot] = Edits(
                np.array([token for token, _ in bias], np.int64),
                np.array([value for _, value in bias], np.float32),
                np.array(ends, np.int64),
                np.array([token for token in sampling.words.allowed if 0 <= token < self.vocab_size], np.int64),
                tuple(word for word in sampling.words.banned if word and 0 <= min(word) <= max(word) < self.vocab_size),
            )

    def _check(self, number: int, step: Step) -> None:
        """A step's positions against what the rows hold."""
        slots, ends, length = step.slots, step.positions + step.counts, self.length[step.slots]
        known = ends
        if step.drafting:
            known = ends.copy()  # but for drafts
            known[: step.drafting] -= step.counts[: step.drafting] - 1
        rules = {
            "positions are not what is computed": step.positions == self.computed[slots],
            "tokens that the row does not have": known <= length,
            "a row samples before its end": (known == length) | ~step.samples,
            "a row lacks blocks": ends <= self.tables_of.blocks(slots) * self.block_tokens,
        }
        if not reduce(and_, rules.values()).all():
            broken = ", ".join(text for text, held in rules.items() if not held.all())
            raise AssertionError(f"step {number}: {broken}")
