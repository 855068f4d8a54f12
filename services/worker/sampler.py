"""Logits to tokens for a step's rows: penalties, edits, then greedy or a draw. No state, no host synchronisation.

A row's token depends on its own logits, seen tokens, parameters, seed and output index only. Greedy rows take an
argmax; only rows with top_k or top_p pay for a selection over the vocabulary.
"""

import torch
from torch import Tensor

from services.worker.inputs import Draw, SamplingBatch
from services.worker.kernels.ops.argmax import argmax
from services.worker.kernels.ops.penalize import penalize
from services.worker.kernels.ops.sample import sample
from services.worker.kernels.ops.top_k_floor import top_k_floor
from services.worker.kernels.ops.top_p_floor import top_p_floor
from services.worker.kernels.registry import Bindings
from services.worker.state import PenaltyCounts


class Sampler:
    def __init__(self, bindings: Bindings) -> None:
        self._argmax, self._penalize, self._sample = bindings(argmax), bindings(penalize), bindings(sample)
        self._top_k_floor, self._top_p_floor = bindings(top_k_floor), bindings(top_p_floor)

    def __call__(self, logits: Tensor, batch: SamplingBatch | None, counts: PenaltyCounts | None) -> Tensor:
        """logits: [S, V] in the activations' dtype, may be overwritten. Returns int32 [S]."""
        logits = logits.float()
        if batch is None:
            return self._argmax(logits)
        if batch.penalties is not None:
            assert counts is not None
            rows = batch.penalties
            self._penalize(
                logits,
                rows.index,
                rows.slots,
                counts.in_output,
                counts.in_prompt,
                rows.presence,
                rows.frequency,
                rows.repetition,
            )
        if batch.edits is not None:
            logits.view(-1).index_add_(0, batch.edits.index, batch.edits.values)
        if batch.draw is None:
            return self._argmax(logits)
        if batch.draw.index is None:
            return self._draw(logits, batch.draw)
        tokens = self._argmax(logits)
        return tokens.index_copy_(0, batch.draw.index, self._draw(logits.index_select(0, batch.draw.index), batch.draw))

    def _draw(self, logits: Tensor, draw: Draw) -> Tensor:
        """logits: float32 [D, V]; returns int32 [D]."""
        if draw.min_p is not None:
            # p >= min_p * max p, on logits
            floor = logits.amax(-1) + draw.temperature * draw.min_p.log()
        else:
            floor = torch.full((len(logits),), -torch.inf, device=logits.device)
        if draw.top_k is not None:
            rows, some = draw.top_k, draw.top_k.index
            found = self._top_k_floor(logits[some], draw.temperature[some], rows.top_k, rows.top_p, rows.max_k)
            floor[some] = torch.maximum(floor[some], found)
        if draw.top_p is not None:
            some = draw.top_p.index
            found = self._top_p_floor(logits[some], draw.temperature[some], draw.top_p.top_p)
            floor[some] = torch.maximum(floor[some], found)
        return self._sample(logits, draw.temperature, floor, draw.seeds, draw.positions)
