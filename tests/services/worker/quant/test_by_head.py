"""Channels put in order by head."""

from dataclasses import dataclass

import pytest
import torch

from services.worker.quant.by_head import by_head
from services.worker.quant.contract import StoredTensor
from services.worker.quant.narrow import narrow


@dataclass(frozen=True)
class Stored:
    values: torch.Tensor
    name: str = "conv.weight"
    storage: str = "F32"
    source: str = "a file"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.to(dtype)

    def blocks(self) -> torch.Tensor:
        raise AssertionError


def test_each_heads_parts_lie_behind_each_other() -> None:
    # two heads: a query of 2 channels, a key of 2, values of 3; a number says part, head and channel
    channels = [[100, 101], [110, 111], [200, 201], [210, 211], [300, 301, 302], [310, 311, 312]]
    whole = torch.tensor([float(number) for part in channels for number in part])
    tensors: dict[str, StoredTensor] = {"conv.weight": Stored(torch.stack((whole, -whole), -1)[:, None])}
    by_head(tensors, "conv.weight", 2, (2, 2, 3))
    ordered = tensors["conv.weight"]
    assert ordered.shape == (14, 2)
    rows = ordered.dense(torch.float32)
    assert rows[:, 0].tolist() == [100, 101, 200, 201, 300, 301, 302, 110, 111, 210, 211, 310, 311, 312]
    assert torch.equal(rows[:, 1], -rows[:, 0])
    assert torch.equal(narrow(ordered, 0, 7, 14).dense(torch.float32), rows[7:]), "a rank's heads are one run"
    with pytest.raises(ValueError, match=r'"conv\.weight" is put in another order'):
        ordered.blocks()


def test_another_shape_is_left_to_the_check_of_shapes() -> None:
    tensors: dict[str, StoredTensor] = {"conv.weight": Stored(torch.zeros(13, 1, 2))}
    by_head(tensors, "conv.weight", 2, (2, 2, 3))
    by_head(tensors, "absent", 2, (2, 2, 3))
    assert tensors["conv.weight"].shape == (13, 1, 2) and len(tensors) == 1
