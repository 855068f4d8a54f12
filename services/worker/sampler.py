"""Logits to tokens for a step's rows: penalties, edits, then greedy or a draw. No state, no host synchronisation.

A row's token depends on its own logits, seen tokens, parameters, seed and output index only. All rows of a step go
through the same few calls, whatever each of them asks for.
"""

import torch
from torch import Tensor

from services.worker.inputs import LogitEdits, SamplingBatch
from services.worker.kernels.ops.argmax import argmax
from services.worker.kernels.ops.draw import draw
from services.worker.kernels.ops.keep_floor import keep_floor
from services.worker.kernels.ops.mask_logits import mask_logits
from services.worker.kernels.ops.penalize import penalize
from services.worker.kernels.ops.sample import sample
from services.worker.kernels.registry import Bindings
from services.worker.state import PenaltyCounts


class Sampler:
    def __init__(self, bindings: Bindings) -> None:
        self._argmax, self._draw, self._sample = bindings(argmax), bindings(draw), bindings(sample)
        self._keep_floor, self._penalize = bindings(keep_floor), bindings(penalize)
        self._mask_logits = bindings(mask_logits)

    def __call__(
        self, logits: Tensor, batch: SamplingBatch | None, counts: PenaltyCounts | None, mask: Tensor | None = None
    ) -> Tensor:
        """logits: [S, V] in the activations' dtype, may be overwritten; mask: which tokens may come, as in mask_logits.

        Returns int32 [S].
        """
        if batch is None:
            if mask is not None:
                self._mask_logits(logits, mask)
            return self._argmax(logits)
        if batch.penalties is not None or batch.edits is not None:
            logits = logits.float()
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
            _edit(logits, batch.edits)
        if mask is not None:
            self._mask_logits(logits, mask)
        how = batch.draw
        if how is None:
            return self._argmax(logits)
        if how.limits is None:
            return self._draw(logits, how.temperature, how.seeds, how.positions)
        limits = how.limits
        floor = self._keep_floor(logits, how.temperature, limits.top_k, limits.top_p, limits.min_p, limits.max_k)
        return self._sample(logits, how.temperature, floor, how.seeds, how.positions)


def _edit(logits: Tensor, edits: LogitEdits) -> None:
    """logits: float32 [S, V], contiguous; changed in place."""
    flat = logits.view(-1)
    if edits.only is not None:
        kept = flat.index_select(0, edits.only.index)
        logits.index_fill_(0, edits.only.rows, -torch.inf)
        flat.index_copy_(0, edits.only.index, kept)
    flat.index_add_(0, edits.index, edits.values)
    if edits.banned is not None:
        banned = edits.banned
        found = banned.tokens.view(-1)[banned.places] == banned.before
        ends = (found | (banned.before < 0)).all(-1)
        flat.index_add_(0, banned.index, torch.where(ends, -torch.inf, 0.0))
