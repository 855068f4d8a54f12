"""Checkpoint tensors made in memory, stored as GGUF stores them."""

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import pytest
import torch


@dataclass(frozen=True)
class Stored:
    """A StoredTensor; `content` is uint8 [rows, bytes of a row]."""

    name: str
    shape: tuple[int, int]
    storage: str
    content: np.ndarray
    source: str = "memory"

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        values = gguf.dequantize(self.content, gguf.GGMLQuantizationType[self.storage])
        return torch.from_numpy(values.copy()).to(dtype)

    def blocks(self) -> torch.Tensor:
        return torch.from_numpy(self.content.copy())


MakeStored = Callable[..., Stored]


@pytest.fixture
def make_stored() -> MakeStored:
    """(storage, rows, columns, scale=1): a random matrix whose values are about `scale` large."""
    random = np.random.default_rng(11)

    def make(storage: str, rows: int, columns: int, scale: float = 1.0) -> Stored:
        kind = gguf.GGMLQuantizationType[storage]
        # the library has no encoder of K types: random bytes with tame scales, numbers and minima as they come
        if storage == "Q6_K":
            blocks = random.integers(0, 256, (rows, columns // 256, 210), dtype=np.uint8)
            blocks[..., 208:] = (
                (random.uniform(0.5, 1.0, (rows, columns // 256, 1)) * scale * 3e-4).astype("<f2").view(np.uint8)
            )
            content = blocks.reshape(rows, -1)
        elif storage == "Q4_K":
            blocks = random.integers(0, 256, (rows, columns // 256, 144), dtype=np.uint8)
            steps = random.uniform(0.5, 1.0, (rows, columns // 256, 2)) * scale * np.array([0.004, 0.03])
            blocks[..., :4] = steps.astype("<f2").view(np.uint8)
            content = blocks.reshape(rows, -1)
        else:
            content = gguf.quantize(random.standard_normal((rows, columns), dtype=np.float32) * scale, kind)
        return Stored(f"{storage}.weight", (rows, columns), storage, content)

    return make
