"""Rotations, and the angles in the forms that they want."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._rotation import both_rotated, halves, packed, rotated
from services.worker.kernels.ops.rope import make_rope_case, rope
from tests.services.worker.kernels.impl.aiter.fake import Fake


def angles() -> tuple[Tensor, Tensor, Tensor]:
    x, cos, sin = make_rope_case(17, 6, 128, 64).make(torch.float32)
    return x, cos, sin


def test_forms() -> None:
    _, cos, sin = angles()
    rows, places = packed(cos, sin)
    assert torch.equal(rows, torch.cat((cos[:, 0, :32], sin[:, 0, 32:]), -1)) and rows.is_contiguous()
    assert places.tolist() == list(range(17)) and places.dtype == torch.int64
    for part, whole in zip(halves(cos, sin), (cos, sin), strict=True):
        assert part.shape == (17, 1, 1, 32) and part.is_contiguous() and torch.equal(part[:, 0], whole[..., 32:])


def test_rotations(fake: Fake) -> None:
    host = fake(exact=True)
    x, cos, sin = angles()
    wanted = rope.meaning(x, cos, sin)
    torch.testing.assert_close(rotated(x, cos, sin), wanted)
    q, k = both_rotated(x[:, :4], x[:, 4:], cos, sin)
    torch.testing.assert_close(torch.cat((q, k), 1), wanted)
    assert host.given[0]["cos"] is host.given[1]["cos"], "made once"
