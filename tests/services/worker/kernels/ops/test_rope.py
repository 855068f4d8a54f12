from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.ops.rope import rope


def formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + R/2) as a complex number."""
    half = cos.shape[-1] // 2
    turn = torch.complex(cos[..., :half], sin[..., half:])
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)


def test_equals_formula(check: Any) -> None:
    check(rope, formula)


def test_keeps_the_length_of_every_head() -> None:
    x, cos, sin = rope.cases[1].make(torch.float32)
    torch.testing.assert_close(rope.meaning(x, cos, sin).norm(dim=-1), x.norm(dim=-1))
