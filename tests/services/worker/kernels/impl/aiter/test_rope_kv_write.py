"""What lies between projection and attention, by AITER: against the op's meaning, and by which calls."""

from typing import Any

import torch

from services.worker.kernels.impl.aiter.rope_kv_write import IMPL
from services.worker.kernels.registry import Case
from tests.services.worker.kernels.impl.aiter.cases import ROPE_KV_WRITE, paged
from tests.services.worker.kernels.impl.aiter.hold import Holder


def test_is_the_meaning_by_as_few_calls_as_can_be(hold: Holder) -> None:
    called = hold(IMPL, cases=ROPE_KV_WRITE)
    assert len(called) == len(ROPE_KV_WRITE) * 8

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
