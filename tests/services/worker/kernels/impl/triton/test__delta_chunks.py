"""The gated delta rule by chunks, where prompts are awkward."""

from typing import Any

import torch

from services.worker.kernels.impl.triton.gated_delta import IMPL
from services.worker.kernels.ops.gated_delta import DeltaShape, make_delta_case
from services.worker.kernels.registry import Case
from tests.services.worker.kernels.impl.triton.hold import Holder


def alike(dtype: torch.dtype) -> tuple[Any, ...]:
    """All keys the same, nothing is forgotten and all is corrected: a chunk's system is as far from diagonal as it can
    be, and powers of it, where an inverse were made of them, would have numbers of eighteen digits."""
    qkv, gates, *others = make_delta_case("", [100], [3], DeltaShape(1, 1, 16, 16)).make(dtype)
    qkv[:, :, 16:32] = 1.0
    gates[..., 0], gates[..., 1] = 30.0, -30.0
    return qkv, gates, *others


def test_keys_that_are_all_alike_and_chunks_behind_many_rows(hold: Holder) -> None:
    """More rows decode than a chunk has tokens; rows end at a chunk's end, and within and behind it."""
    counts = [1] * 66 + [0, 64, 1, 65, 0, 30]
    before = [2] * 66 + [3, 0, 5, 4, 0, 0]
    behind = make_delta_case("behind", counts, before, DeltaShape(1, 1, 16, 16))
    hold(IMPL, cases=[Case("alike", alike), behind])
