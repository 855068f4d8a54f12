"""What lies between projection and attention, by AITER: against the op's meaning, and by which calls."""

from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter.rope_kv_write import IMPL
from services.worker.kernels.ops.kv_write import KvScale
from services.worker.kernels.ops.rope_kv_write import HeadNorm, make_rope_kv_case
from services.worker.kernels.registry import Case
from tests.services.worker.kernels.impl.aiter.hold import Holder


def paged(name: str, heads: tuple[int, int, int], rotary_dim: int = 0, normed: bool = False, fp8: bool = False) -> Case:
    """As the op's cases, with pages of 16 tokens."""
    num_tokens = 21

    def make(dtype: torch.dtype) -> tuple[Tensor | HeadNorm | KvScale | None, ...]:
        arguments: list[Any] = list(
            make_rope_kv_case(num_tokens, *heads, rotary_dim or heads[2], normed, fp8).make(dtype)
        )
        arguments[3:5] = (x[:4].reshape(2, 16, *x.shape[2:]) for x in arguments[3:5])
        arguments[5] = torch.randperm(32, generator=torch.Generator().manual_seed(1))[:num_tokens]
        return tuple(arguments)

    return Case(name, make)


CASES = (
    paged("llama", (8, 2, 128)),
    paged("qwen3", (8, 4, 128), normed=True),
    paged("small", (4, 4, 64)),
    paged("odd", (6, 2, 96)),
    paged("odd_normed", (6, 2, 96), normed=True),
    paged("partial", (4, 2, 64), rotary_dim=32),
    paged("partial_normed", (4, 2, 64), rotary_dim=32, normed=True),
    paged("fp8", (4, 2, 64), fp8=True),
    paged("fp8_normed", (4, 2, 128), normed=True, fp8=True),
)


def test_is_the_meaning_by_as_few_calls_as_can_be(hold: Holder) -> None:
    called = hold(IMPL, cases=CASES)
    assert len(called) == len(CASES) * 8

    def calls(case: str, dtype: str = "bfloat16", release: str = "e4048607") -> list[str]:
        return called[f"{case} {dtype} {release} gfx942"]

    assert calls("llama") == ["fused_qk_rope_reshape_and_cache"]
    assert calls("qwen3") == calls("qwen3", "float16") == ["fused_qk_norm_rope_cache_quant_shuffle"]
    assert (
        calls("llama", "float16")
        == calls("odd")
        == calls("partial")
        == calls("fp8")
        == [
            "rope_cached_2c_fwd",
            "reshape_and_cache",
        ]
    )
    apart = ["rmsnorm2d_fwd", "rope_cached_2c_fwd", "reshape_and_cache"]
    assert calls("odd_normed") == calls("partial_normed") == calls("fp8_normed") == apart
    assert calls("llama", release="0.1.7.post2.dev18") == ["rope_cached_2c_fwd", "reshape_and_cache_flash"]
    assert calls("qwen3", release="0.1.7.post2.dev18") == [*apart[:2], "reshape_and_cache_flash"]


def test_no_tokens(hold: Holder) -> None:
    empty = Case("empty", lambda dtype: (torch.empty(0, 12 * 64, dtype=dtype), *paged("", (8, 2, 64)).make(dtype)[1:]))

    def make(dtype: torch.dtype) -> tuple[Any, ...]:
        qkv, cos, sin, k, v, slots, norm, scale = empty.make(dtype)
        return qkv, cos[:0], sin[:0], k, v, slots[:0], norm, scale

    assert not any(hold(IMPL, cases=(Case("empty", make),)).values())
