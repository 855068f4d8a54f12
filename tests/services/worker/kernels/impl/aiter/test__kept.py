"""What is made of a tensor goes with it."""

import gc

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._kept import Kept


def test_what_is_made_is_kept_as_long_as_its_tensor() -> None:
    made: list[int] = []

    def make(first: Tensor, second: Tensor) -> int:
        made.append(len(made))
        return made[-1]

    once = Kept(make)
    first, second = torch.ones(3), torch.ones(3)
    assert once(first, second) == once(first, second) == 0 and once(first.clone(), second) == 1
    assert once(first, second) == 0, "equal tensors are not the same"
    del first
    gc.collect()
    assert len(once._made) == 0
