"""Vectors of prompts: what hidden states of rows that are pooled come to, on the device. Owner: the step's Reporter,
which calls `start`, `parts` while inputs are put, `pool` when hidden states are there, `taken` when all is launched.

A part is what a step computes of a prompt: of a mean all its tokens, else the prompt's last one. Sums of a mean wait
here from chunk to chunk, by slot; a step that did not succeed has changed none. Nothing here waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.pooling import Pooling
from services.worker.inputs import Put
from services.worker.state import Ints, Rows, Step

SPAN = 64


class Whole(NamedTuple):
    """Prompts that the step completes, of one way of pooling."""

    pooling: Pooling
    rows: list[int]  # places in the plan
    which: Tensor  # int64 [W], among the parts
    counts: Tensor  # float32 [W, 1], tokens that were summed


class Parts(NamedTuple):
    """P parts of I tokens."""

    places: Tensor  # int64 [I], among the hidden states, part after part
    sizes: list[Tensor]  # int64, how many follow each other that are summed, level by level; none: each is one token
    sums: dict[int, int]  # slot of each mean that is not whole yet: its part
    earlier: list[int]  # slots whose sums go on
    goes_on: Tensor | None  # int64, their parts
    whole: list[Whole]


class Vectors(NamedTuple):
    rows: list[int]  # places in the plan
    lines: Tensor  # float32 [W, D] in memory of the host, there when the step is over


def pools_means(step: Step, rows: Rows) -> bool:
    """Whether the step computes a part of a mean: then the hidden states of all its tokens are needed."""
    return any(
        (pooling := report.pooling) is not None and pooling.mode == "mean" and bool((step.slots == slot).any())
        for slot, report in rows.reports.items()
    )


class Pooler:
    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # float32 [N], of slots whose mean is not whole yet
        self.start()

    def start(self) -> None:
        """A step begins, or begins again."""
        self._new: dict[int, Tensor] = {}
        self._vectors: list[Vectors] = []

    def parts(self, step: Step, rows: Rows, put: Put, last: Ints | None = None) -> Parts | None:
        """What the step, spread out, computes of prompts that are pooled; None: nothing.

        last: where the hidden state of each row's last token is, if not at that token's place; then no part is of a
        mean.
        """
        wanted = {slot: report.pooling for slot, report in rows.reports.items() if report.pooling is not None}
        self._sums = {slot: found for slot, found in self._sums.items() if slot in wanted}
        if not wanted:
            return None
        ends = np.cumsum(step.counts) if last is None else last + 1
        drafts = step.drafting - len(np.unique(step.slots[: step.drafting]))  # entries that are no rows of the plan
        index: list[Ints] = []
        goes_on: dict[int, int] = {}
        sums: dict[int, int] = {}
        whole: dict[Pooling, list[tuple[int, int, int]]] = {}
        for j in np.flatnonzero(np.isin(step.slots, list(wanted))).tolist():
            slot, position, count = (int(column[j]) for column in (step.slots, step.positions, step.counts))
            pooling, is_whole = wanted[slot], position + count == rows.num_prompt[slot]
            if pooling.mode == "mean":
                assert last is None and (not position or slot in self._sums), f"slot {slot} has no sum to go on with"
                sums |= {} if is_whole else {slot: len(index)}
                goes_on |= {slot: len(index)} if position else {}
            elif is_whole:
                count, position = 1, 0
            else:
                continue
            if is_whole:
                whole.setdefault(pooling, []).append((j - drafts, len(index), position + count))
            index.append(np.arange(ends[j] - count, ends[j]))
        if not index:
            return None
        return Parts(
            put(np.concatenate(index)),
            [put(sizes) for sizes in levels([len(each) for each in index])],
            sums,
            list(goes_on),
            put(np.array(list(goes_on.values()), np.int64)) if goes_on else None,
            [_whole(pooling, found, put) for pooling, found in whole.items()],
        )

    def pool(self, parts: Parts | None, hidden: Tensor, normed: Callable[[Tensor], Tensor]) -> None:
        """hidden: in the places of the parts, before the final norm, which is `normed`."""
        if parts is None:
            return
        found = normed(hidden.index_select(0, parts.places)).float()
        for sizes in parts.sizes:  # index_add_ would sum in another order each time, a product spread one row's NaN
            found = torch.segment_reduce(found, "sum", lengths=sizes, axis=0, unsafe=True)
        if parts.goes_on is not None:
            found.index_add_(0, parts.goes_on, torch.stack([self._sums[slot] for slot in parts.earlier]))
        self._new |= {slot: found[part] for slot, part in parts.sums.items()}
        for pooling, rows, which, counts in parts.whole:
            vectors = found.index_select(0, which) / counts
            vectors = vectors[:, : pooling.dimensions or vectors.shape[1]].contiguous()
            if pooling.normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
            self._vectors.append(Vectors(rows, _to_host(vectors)))

    def taken(self) -> list[Vectors]:
        """Of this step, which has succeeded."""
        self._sums |= self._new
        return self._vectors


def levels(lengths: Sequence[int]) -> list[Ints]:
    """How sums of so many terms are made of sums of at most SPAN: a device makes each by one thread per column."""
    found: list[Ints] = []
    while max(lengths) > 1:
        pieces = [np.minimum(SPAN, length - np.arange(0, length, SPAN)) for length in lengths]
        found.append(np.concatenate(pieces))
        lengths = [len(each) for each in pieces]
    return found


def _whole(pooling: Pooling, found: list[tuple[int, int, int]], put: Put) -> Whole:
    """found: row, part, tokens."""
    rows, which, counts = zip(*found, strict=True)
    return Whole(pooling, list(rows), put(np.array(which, np.int64)), put(np.array(counts, np.float32)[:, None]))


def _to_host(vectors: Tensor) -> Tensor:
    """Starts the copy."""
    if vectors.device.type == "cpu":
        return vectors
    return torch.empty(vectors.shape, dtype=torch.float32, pin_memory=True).copy_(vectors, non_blocking=True)
