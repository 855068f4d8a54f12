"""AITER's gates write whole vectors, so that other widths are torch's."""

from typing import Any

import pytest
import torch

from services.worker.kernels.impl.aiter._gate import gated
from services.worker.kernels.ops.gelu_and_mul import gelu_and_mul
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Op
from tests.services.worker.kernels.impl.aiter.fake import Fake


@pytest.mark.parametrize(("activation", "op", "name"), [
    ("silu", silu_and_mul, "silu_and_mul"), ("gelu_tanh", gelu_and_mul, "gelu_tanh_and_mul")
])  # fmt: skip
def test_gates(fake: Fake, activation: str, op: Op[Any], name: str) -> None:
    host = fake(exact=True)
    for width, called in ((24, [name]), (20, [name])):
        x = torch.randn(3, 2 * width)
        torch.testing.assert_close(gated(x, activation), op.meaning(x))
        assert host.calls == called
    assert gated(torch.randn(0, 16), activation).shape == (0, 8) and len(host.calls) == 1
