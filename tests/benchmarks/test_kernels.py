"""What is made of the figures; the figures themselves need a GPU."""

import pytest
from rich.console import Console

from benchmarks.kernel_time import Row
from benchmarks.kernel_work import works
from benchmarks.kernels import compile_only, show, steps
from benchmarks.shapes import QWEN3_30B_A3B, QWEN3_600M, ModelShape


def rows(model: ModelShape, tokens: int, us: float) -> list[Row]:
    return [
        Row(w.op, w.label, model.name, tokens, us, us / 2, "bytes", 50.0, 2 * us, "eager", w.per_step)
        for w in works(model, tokens)
    ]


def test_a_step_is_the_sum_of_its_calls() -> None:
    (step,) = steps(rows(QWEN3_600M, 16, 10.0), [QWEN3_600M], [16])
    # per layer qkv, rope, attention, o, gate and up, down; then head and draw
    assert step.ms == pytest.approx((6 * 28 + 2) * 10 / 1e3)
    assert step.floor_ms == pytest.approx(step.ms / 2) and step.torch_ms == pytest.approx(step.ms * 2)
    assert step.missing == ""


def test_ops_without_a_kernel_are_named() -> None:
    some = [row for row in rows(QWEN3_30B_A3B, 1, 1.0) if row.op not in ("moe_gated", "norm_route")]
    (step,) = steps(some, [QWEN3_30B_A3B], [1])
    assert step.missing == "moe_gated, norm_route"


def test_the_tables_show_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    some = [rows(QWEN3_600M, 1, 10.0)[0], rows(QWEN3_600M, 1, 7.0)[1]._replace(torch_us=None, torch_how="cannot")]
    show(Console(width=140), some, steps(some, [QWEN3_600M], [1]), "conditions [of] all")
    shown = capsys.readouterr().out
    assert "norm_linear qkv" in shown and "2.00" in shown and "cannot" in shown and "conditions [of] all" in shown


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(SystemExit, match="unknown target 'sm_80'"):
        compile_only(["sm_80", "sm_90"], "", False, None)
