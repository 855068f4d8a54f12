from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.kernels.ops.kv_write import KvScale
from services.worker.kernels.ops.paged_attention import make_attention_rows
from services.worker.kernels.ops.rope_kv_write import HeadNorm
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.attention import Attention
from services.worker.layers.kv_cache import LayerKv
from services.worker.layers.linear import Linear
from services.worker.models.spec import DecoderSpec, RopeSpec

SPEC = DecoderSpec(10, 12, 8, 1, 4, 2, 6, 1e-5, RopeSpec(1e4, 6), 64, False)


@pytest.fixture
def make(plain_weight: Any) -> Callable[[HeadNorm | None], Attention]:
    return lambda head_norm: make_attention(plain_weight, head_norm)


def make_attention(plain_weight: Any, head_norm: HeadNorm | None) -> Attention:
    torch.manual_seed(0)
    bindings = bind(("torch",), Facts("cpu"))
    qkv, out = (Linear(plain_weight(torch.randn(*shape)), None, bindings) for shape in ((48, 12), (12, 24)))
    return Attention(SPEC, qkv, out, head_norm, bindings)


def rotation(angle: float) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = torch.full((3, 1, 6), angle).cos(), torch.full((3, 1, 6), angle).sin()
    sin[..., :3] *= -1
    return cos, sin


def attend(attention: Attention, angle: float, scale: KvScale | None = None) -> tuple[torch.Tensor, LayerKv]:
    """One row of three tokens in slots 4, 5, 6; returns the output and the cache, of 8 bits with a scale."""
    qkv = attention.project(torch.randn(3, 12, generator=torch.Generator().manual_seed(1)))
    dtype = torch.float32 if scale is None else torch.float8_e4m3fn
    cache = LayerKv(*(torch.zeros(2, 4, 2, 6, dtype=dtype) for _ in range(2)), scale)
    rows = make_attention_rows([3], [3], [[1]], 4)
    return attention.attend(qkv, rotation(angle), cache, torch.tensor([4, 5, 6]), rows), cache


def test_the_projection_is_query_then_key_then_value_heads(make: Any) -> None:
    attention = make(None)
    heads = attention.project(torch.randn(3, 12, generator=torch.Generator().manual_seed(1))).view(3, 8, 6)
    _, (keys, values, _) = attend(attention, 0.0)
    assert torch.equal(keys[1, :3], heads[:, 4:6]) and torch.equal(values[1, :3], heads[:, 6:])
    assert not keys[0].any() and not values[0].any()


def test_values_are_not_rotated_and_head_norm_comes_before_the_rotation(make: Any) -> None:
    _, plain = attend(make(None), 0.0)
    _, turned = attend(make(None), 0.7)
    assert torch.equal(plain.values, turned.values) and not torch.allclose(plain.keys, turned.keys)
    _, normed = attend(make(HeadNorm(torch.ones(6), torch.full((6,), 2.0), 0.0)), 0.7)
    torch.testing.assert_close(normed.keys[1, :3].pow(2).mean(-1), torch.full((3, 2), 4.0))


def test_attend_sees_what_it_has_just_written(make: Any) -> None:
    out, (_, values, _) = attend(make(None), 0.3)
    assert out.shape == (3, 24)
    torch.testing.assert_close(out[0].view(2, 2, 6), values[1, 0][:, None].expand(2, 2, 6))


def test_the_scale_of_8_bits_is_the_caches_which_may_be_another_one(make: Any) -> None:
    """The scales are powers of two, so that all of them store the same digits."""
    attention = make(None)
    exact, _ = attend(attention, 0.3)
    one, stored = attend(attention, 0.3, KvScale(torch.ones(1), torch.ones(1)))
    torch.testing.assert_close(one, exact, rtol=0, atol=0.3)
    assert not torch.equal(one, exact)
    fine, scaled = attend(attention, 0.3, KvScale(torch.tensor([0.25]), torch.tensor([0.125])))
    torch.testing.assert_close(fine, one, rtol=0, atol=1e-3)
    torch.testing.assert_close(scaled.keys.float(), stored.keys.float() * 4, rtol=0, atol=0.02)
    torch.testing.assert_close(scaled.values.float(), stored.values.float() * 8, rtol=0, atol=0.02)
    assert torch.equal(attend(attention, 0.3)[0], exact)
