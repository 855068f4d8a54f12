"""The worker's rows: one per running sequence. Owner: `Rows.apply` (start of a step) and `Rows.commit` (end).

Token ids live on the device, since sampled ones are appended there and the host need not know them; everything a plan
decides (lengths, block tables, sampling parameters) lives on the host. A GPU has the block tables too (`resident`): a
new row's are written here, later blocks by the step that first uses them. The worker decides nothing: a plan that does
not fit the rows is a broken invariant and ends the process.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.protocol import RowStart, Sampling, StepPlan
from services.worker import memory

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
    """A plan's rows as int64 columns [R]; `samples` is bool [R]."""

    slots: Ints
    positions: Ints
    counts: Ints
    samples: npt.NDArray[np.bool_]


class Edits(NamedTuple):
    """Logit changes by token id that only some rows have; ids outside the vocabulary are left out."""

    bias_ids: Ints
    bias_values: npt.NDArray[np.float32]
    end_ids: Ints  # tokens that may not come before min_tokens


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


class Rows:
    """`length` counts a row's tokens, those on the way from the device included; `computed` those with KV."""

    def __init__(self, shape: memory.Shape, vocab_size: int, eos_ids: tuple[int, ...], device: torch.device) -> None:
        max_rows, max_len, block_tokens = shape
        self.block_tokens, self.vocab_size = block_tokens, vocab_size
        self.eos_ids = eos_ids
        # One column more than max_len: a row that has reached it may still draw a token that nobody will run.
        # One row more than there are slots: what pads a batch reads and writes there.
        self.tokens = memory.zeros((max_rows + 1, max_len + 1), torch.int32, device)
        width = -(-max_len // block_tokens)
        self.resident = None if device.type == "cpu" else memory.zeros((max_rows + 1, width), torch.int32, device)
        self.live = np.zeros(max_rows, np.bool_)
        self.length = np.zeros(max_rows, np.int64)
        self.computed = np.zeros(max_rows, np.int64)
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.num_blocks = np.zeros(max_rows, np.int64)
        self.tables = np.zeros((max_rows, width), np.int32)
        self.sampling = np.zeros(max_rows, SAMPLING)
        self.is_plain = np.zeros(max_rows, np.bool_)  # greedy, or drawn by temperature alone
        self.edits: dict[int, Edits] = {}
        self.penalties: PenaltyCounts | None = None

    @property
    def max_len(self) -> int:
        return self.tokens.shape[1] - 1

    @property
    def padding_row(self) -> int:
        return len(self.live)

    def reset(self) -> None:
        """Forgets all rows."""
        self.live[:] = False
        self.edits.clear()

    def apply(self, plan: StepPlan) -> Step:
        """Applies removed, added and grown in this order and checks the step's rows against the result."""
        for slot in np.frombuffer(plan.removed, np.int32).tolist():
            assert self.live[slot], f"step {plan.step} removes slot {slot}, which holds no row"
            self.live[slot] = False
            self.edits.pop(slot, None)
        for row in plan.added:
            self._start(row)
        if plan.added:
            self._upload(plan.added)
        for slot, block in zip(
            np.frombuffer(plan.grown_slots, np.int32).tolist(),
            np.frombuffer(plan.grown_blocks, np.int32).tolist(),
            strict=True,
        ):
            self.tables[slot, self.num_blocks[slot]] = block
            self.num_blocks[slot] += 1
        step = Step(
            np.frombuffer(plan.slots, np.int32).astype(np.int64),
            np.frombuffer(plan.positions, np.int32).astype(np.int64),
            np.frombuffer(plan.counts, np.int32).astype(np.int64),
            np.frombuffer(plan.samples, np.bool_),
        )
        self._check(plan.step, step)
        return step

    def commit(self, step: Step, held: Ints | None = None) -> None:
        """Counts what the step has computed, and what it has drawn, which is in `tokens` already.

        held: slots whose tokens are not; they are counted by `count`.
        """
        self.computed[step.slots] += step.counts
        slots = step.slots[step.samples]
        drawn = slots if held is None else slots[~np.isin(slots, held)]
        self.count(drawn, self.length[drawn])
        self.length[slots] += 1

    def count(self, slots: Ints, places: Ints) -> None:
        """The tokens at these places of these slots are output, for penalties."""
        if self.penalties is None or not len(slots):
            return
        device, counts = self.tokens.device, self.penalties.in_output
        flat_places = torch.from_numpy(slots * self.tokens.shape[1] + places).to(device)
        sampled = self.tokens.view(-1).index_select(0, flat_places)
        flat = torch.from_numpy(slots * self.vocab_size).to(device) + sampled
        counts.view(-1).index_add_(0, flat, torch.ones_like(sampled))

    def _start(self, row: RowStart) -> None:
        slot = row.slot
        tokens = np.frombuffer(row.tokens, np.int32)
        blocks = np.frombuffer(row.blocks, np.int32)
        assert not self.live[slot], f"slot {slot} is taken twice"
        assert 0 < row.num_prompt <= len(tokens) <= self.max_len, (row.num_prompt, len(tokens), self.max_len)
        assert 0 <= row.computed < len(tokens), (row.computed, len(tokens))
        assert tokens.min() >= 0 and tokens.max() < self.vocab_size, "a token id is outside the vocabulary"
        self.live[slot] = True
        self.length[slot], self.computed[slot], self.num_prompt[slot] = len(tokens), row.computed, row.num_prompt
        self.tables[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self._start_sampling(slot, row.sampling)

    def _upload(self, added: Sequence[RowStart]) -> None:
        """Token ids and block tables of new rows to the device, all rows in one copy each."""
        row_len = self.tokens.shape[1]
        tokens = [np.frombuffer(row.tokens, np.int32) for row in added]
        places = [np.arange(len(ids)) + row.slot * row_len for row, ids in zip(added, tokens, strict=True)]
        self._scatter(self.tokens, places, tokens)
        if self.resident is not None:
            blocks = [np.frombuffer(row.blocks, np.int32) for row in added]
            width = self.resident.shape[1]
            entries = [np.arange(len(ids)) + row.slot * width for row, ids in zip(added, blocks, strict=True)]
            self._scatter(self.resident, entries, blocks)
        for row, ids in zip(added, tokens, strict=True):
            if self.has_penalty(row.sampling):
                if self.penalties is None:
                    self.penalties = PenaltyCounts(len(self.live), self.vocab_size, self.tokens.device)
                self.penalties.start(row.slot, self.tokens[row.slot, : len(ids)].long(), row.num_prompt)

    @staticmethod
    def _scatter(target: Tensor, places: Sequence[Ints], values: Sequence[npt.NDArray[np.int32]]) -> None:
        """target.view(-1)[places] = values."""
        index, content = torch.from_numpy(np.concatenate(places)), torch.from_numpy(np.concatenate(values))
        if target.device.type != "cpu":
            index, content = (part.pin_memory().to(target.device, non_blocking=True) for part in (index, content))
        target.view(-1).index_copy_(0, index, content)

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
        ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_ids)] if sampling.min_tokens else []
        if sampling.grammar is not None:
            ends = []  # its mask knows when an end may come
        bias = [(token, value) for token, value in sampling.logit_bias if 0 <= token < self.vocab_size]
        ends = [token for token in dict.fromkeys(ends) if 0 <= token < self.vocab_size]
        filtered = sampling.temperature > 0 and (
            self.sampling["top_k"][slot] != 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        )
        special = sampling.grammar is not None or self.has_penalty(sampling)
        self.is_plain[slot] = not (filtered or bias or ends or special)
        if bias or ends:
            self.edits[slot] = Edits(
                np.array([token for token, _ in bias], np.int64),
                np.array([value for _, value in bias], np.float32),
                np.array(ends, np.int64),
            )

    @staticmethod
    def has_penalty(sampling: Sampling) -> bool:
        return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)

    def _check(self, number: int, step: Step) -> None:
        slots, ends, length = step.slots, step.positions + step.counts, self.length[step.slots]
        assert len(set(slots.tolist())) == len(slots), f"step {number}: a slot has two rows"
        rules = {
            "a slot holds no row": self.live[slots],
            "a row without tokens": step.counts > 0,
            "positions are not what is computed": step.positions == self.computed[slots],
            "tokens that the row does not have": ends <= length,
            "a row lacks blocks": ends <= self.num_blocks[slots] * self.block_tokens,
            "a row samples before its end": (ends == length) | ~step.samples,
        }
        assert np.logical_and.reduce(list(rules.values())).all(), (
            f"step {number}: {', '.join(text for text, held in rules.items() if not held.all())}"
        )
