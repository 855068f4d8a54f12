"""AITER's attention against the op's meaning: every sort of rows and pages, and which kernel served it."""

from services.worker.kernels.impl.aiter.paged_attention import IMPL
from tests.services.worker.kernels.impl.aiter.cases import ATTENTION
from tests.services.worker.kernels.impl.aiter.hold import Holder


def test_is_the_meaning_of_the_ops_own_cases(hold: Holder) -> None:
    called = hold(IMPL)
    assert any(name.startswith("fp8_window ") for name in called) and any("sinks" in name for name in called)


def test_which_kernel_serves_what(hold: Holder) -> None:
    called = hold(IMPL, cases=ATTENTION)
    assert len(called) == len(ATTENTION) * 8

    def calls(case: str) -> list[str]:
        for arch in ("gfx942", "gfx950"):
            assert called[f"{case} bfloat16 0.1.7.post2.dev18 {arch}"] == ["unified_attention"]
            assert called[f"{case} bfloat16 e4048607 {arch}"] == called[f"{case} float16 e4048607 gfx942"]
        return called[f"{case} bfloat16 e4048607 gfx942"]

    assert calls("decode") == ["pa_fwd_asm"]
    assert calls("mixed") == calls("tables") == ["pa_fwd_asm", "mha_batch_prefill_func"]
    assert calls("prompts") == ["mha_batch_prefill_func"]
    assert calls("wide_group") == ["get_recommended_splits", "pa_decode_gluon", "mha_batch_prefill_func"]
    assert calls("head64") == calls("page64") == ["get_recommended_splits", "pa_decode_gluon", "unified_attention"]
    assert calls("fp8") == ["get_recommended_splits", "pa_decode_gluon", "unified_attention"]
    assert calls("window") == calls("softcap") == calls("sinks") == ["unified_attention", "mha_batch_prefill_func"]
    assert calls("head256") == ["unified_attention", "mha_batch_prefill_func"]
    assert calls("fp8_window") == calls("window64") == calls("softcap64") == ["unified_attention"]
