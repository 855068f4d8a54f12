from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.kernels.ops.paged_attention import make_attention_rows
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.attention import Attention, HeadNorm
from services.worker.layers.linear import Linear
from services.worker.models.spec import DecoderSpec, RopeSpec

SPEC = DecoderSpec(10, 12, 8, 1, 4, 2, 6, 1e-5, RopeSpec(1e4, 6), 64, False)


@pytest.fixture
def make(plain_weight: Any) -> Callable[[HeadNorm | None], Attention]:
    return lambda head_norm: make_attention(plain_weight, head_norm)


def make_attention(plain_weight: Any, head_norm: HeadNorm | None) -> Attention:
    torch.manual_seed(0)
    qkv, out = Linear(plain_weight(torch.randn(48, 12))), Linear(plain_weight(torch.randn(12, 24)))
    return Attention(SPEC, qkv, out, head_norm, bind(("torch",), Facts("cpu")))


def project(attention: Attention, angle: float) -> tuple[torch.Tensor, ...]:
    cos, sin = torch.full((3, 1, 6), angle).cos(), torch.full((3, 1, 6), angle).sin()
    sin[..., :3] *= -1
    return attention.project(torch.randn(3, 12, generator=torch.Generator().manual_seed(1)), cos, sin)


def test_projection_splits_into_query_key_and_value_heads(make: Any) -> None:
    attention = make(None)
    q, k, v = project(attention, 0.0)
    assert q.shape == (3, 4, 6) and k.shape == v.shape == (3, 2, 6)
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.cat((q, k, v), 1).reshape(3, 48), attention.qkv(x))


def test_values_are_not_rotated_and_head_norm_comes_before_the_rotation(make: Any) -> None:
    plain = project(make(None), 0.0)
    turned = project(make(None), 0.7)
    assert torch.equal(plain[2], turned[2]) and not torch.allclose(plain[0], turned[0])
    normed = project(make(HeadNorm(torch.ones(6), torch.full((6,), 2.0), 0.0)), 0.7)
    torch.testing.assert_close(normed[0].pow(2).mean(-1), torch.ones(3, 4))
    torch.testing.assert_close(normed[1].pow(2).mean(-1), torch.full((3, 2), 4.0))


def test_attend_sees_what_it_has_just_written(make: Any) -> None:
    attention = make(None)
    q, k, v = project(attention, 0.3)
    cache: Any = (torch.zeros(2, 4, 2, 6), torch.zeros(2, 4, 2, 6))
    rows = make_attention_rows([3], [3], [[1]], 4)
    out = attention.attend(q, k, v, cache, torch.tensor([4, 5, 6]), rows)
    assert out.shape == (3, 24)
    torch.testing.assert_close(out[0].view(2, 2, 6), v[0][:, None].expand(2, 2, 6))
