"""Weights drawn at random in place of a checkpoint's (`model.weights = "random"`): speed without a download.

Used by the model engine instead of the checkpoint's tensors. Each tensor is drawn when it is asked for, on the
device and in the dtype that it is kept in, so that a large model is there in seconds. Equal names give equal values.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from services.worker.quant.contract import StoredTensor


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A StoredTensor that was never stored."""

    name: str
    shape: tuple[int, ...]
    device: torch.device

    @property
    def storage(self) -> str:
        return "F32"

    @property
    def source(self) -> str:
        return "random weights"

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Matrices: normal with deviation 1 / sqrt(in), so that products keep their size; norms 1; biases 0."""
        if len(self.shape) == 1:
            fill = torch.zeros if self.name.endswith("bias") else torch.ones
            return fill(self.shape, dtype=dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(self.name.encode()))
        values = torch.empty(self.shape, dtype=dtype, device=self.device)
        return values.normal_(0.0, self.shape[-1] ** -0.5, generator=generator)

    def blocks(self) -> torch.Tensor:
        raise ValueError(f'tensor "{self.name}" is drawn at random, not stored in blocks')


def draw_all(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, StoredTensor]:
    """One tensor for each name that a model expects. Draws nothing yet."""
    return {name: RandomTensor(name, shape, device) for name, shape in shapes.items()}
