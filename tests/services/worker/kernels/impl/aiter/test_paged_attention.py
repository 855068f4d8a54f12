"""AITER's attention against the op's meaning: every sort of rows and pages, and which kernel served it."""

from services.worker.kernels.impl.aiter.paged_attention import IMPL
from services.worker.kernels.ops.paged_attention import Extras, make_attention_case
from tests.services.worker.kernels.impl.aiter.hold import Holder

MIXED = ([1, 1, 30, 1, 9], [90, 17, 30, 64, 200])
CASES = (
    make_attention_case("decode", [1, 1, 1], [40, 257, 1], (8, 2, 128)),
    make_attention_case("mixed", *MIXED, (8, 1, 128)),
    make_attention_case("wide_group", *MIXED, (32, 1, 128)),
    make_attention_case("prompts", [20, 5], [20, 33], (4, 4, 128)),
    make_attention_case("head64", *MIXED, (8, 2, 64)),
    make_attention_case("head256", *MIXED, (4, 2, 256)),
    make_attention_case("page64", *MIXED, (8, 2, 128), extras=Extras(64, table_rows=True)),
    make_attention_case("window", *MIXED, (8, 2, 128), extras=Extras(window=20)),
    make_attention_case("softcap", *MIXED, (8, 2, 128), extras=Extras(softcap=3.0)),
    make_attention_case("sinks", *MIXED, (8, 2, 128), extras=Extras(sinks=True)),
    make_attention_case("fp8", *MIXED, (8, 2, 128), extras=Extras(fp8=True)),
    make_attention_case("fp8_window", *MIXED, (8, 2, 128), extras=Extras(window=9, fp8=True)),
    make_attention_case("tables", *MIXED, (8, 2, 128), extras=Extras(table_rows=True)),
)


def test_is_the_meaning_of_the_ops_own_cases(hold: Holder) -> None:
    called = hold(IMPL)
    assert any(name.startswith("fp8_window ") for name in called) and any("sinks" in name for name in called)


def test_which_kernel_serves_what(hold: Holder) -> None:
    called = hold(IMPL, cases=CASES)
    assert len(called) == len(CASES) * 8

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
    assert calls("fp8_window") == ["unified_attention"]
