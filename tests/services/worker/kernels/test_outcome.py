"""Arguments of ops as one structure of tensors."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from services.worker.kernels.outcome import Mover, convert, equal_bits, outcome, tensors


class Pair(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor | None


@dataclass(frozen=True)
class Rows:
    starts: torch.Tensor
    count: int


def test_every_tensor_has_a_path() -> None:
    value = (torch.zeros(1), Pair(torch.ones(2), None), [Rows(torch.zeros(3), 4)], 5, None)
    assert [(name, len(tensor)) for name, tensor in tensors(value, "x")] == [
        ("x.0", 1),
        ("x.1.k", 2),
        ("x.2.0.starts", 3),
    ]
    assert list(outcome(torch.zeros(1), value)) == ["result", "argument.0", "argument.1.k", "argument.2.0.starts"]


def test_a_structure_is_kept() -> None:
    pair, rows = convert((Pair(torch.ones(2), None), Rows(torch.ones(3), 4)), lambda tensor: tensor + 1)
    assert isinstance(pair, Pair) and pair.k.tolist() == [2, 2] and pair.v is None
    assert isinstance(rows, Rows) and rows.starts.tolist() == [2, 2, 2] and rows.count == 4


def test_views_of_one_storage_stay_so() -> None:
    whole = torch.arange(12.0).view(3, 4)
    left, right = convert((whole[:, :2], whole[:, 2:]), Mover(torch.device("cpu")))
    assert left.data_ptr() != whole.data_ptr() and right.data_ptr() - left.data_ptr() == 8
    assert left.stride() == (4, 1) and torch.equal(right, whole[:, 2:])


def test_bits() -> None:
    assert equal_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not equal_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not equal_bits(torch.zeros(2), torch.zeros(3)) and equal_bits(torch.zeros(0), torch.zeros(0))
