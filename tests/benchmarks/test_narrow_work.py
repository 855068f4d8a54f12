"""The arguments are what the narrow ops take; bytes are those of the stored weights: on small models, on the CPU."""

import pytest
import torch

from benchmarks import kernel_work, narrow_work
from benchmarks.kernel_work import Work
from benchmarks.narrow_work import mixtures, products, quantizers
from benchmarks.shapes import LLAMA_8B, ModelShape
from services.worker.kernels.registry import all_ops

DENSE = ModelShape("dense", 2, 128, 4, 2, 64, 256, 300)
MIXED = ModelShape("mixed", 2, 128, 4, 2, 32, 128, 300, experts=8, top_k=2)


@pytest.mark.parametrize("model", [DENSE, MIXED], ids=lambda model: model.name)
def test_arguments_fit_the_ops(model: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_work, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_work, "DTYPE", torch.bfloat16)
    found: list[Work] = [*products(model, 3), *mixtures(model, 3), *quantizers(model, 3)]
    for work in found:
        arguments = work.make()
        result = all_ops()[work.op].meaning(*arguments)
        outputs = result if isinstance(result, tuple) else (result, arguments[0], arguments[-1])
        for output in outputs:
            assert not isinstance(output, torch.Tensor) or output.float().isfinite().all(), work.key
        assert work.num_bytes > 0 and work.per_step == 0
    ops = {work.op for work in found}
    assert {"row_scaled_linear", "block_scaled_linear", "int4_linear", "add_narrow_linear"} <= ops
    assert ("moe_int4" in ops) == bool(model.experts) != ("norm_gated_narrow_linear" in ops)


def test_four_bits_read_a_quarter_of_what_bf16_reads() -> None:
    read = {work.label: work.num_bytes for work in products(LLAMA_8B, 1) if work.op.startswith("add_")}
    numbers = LLAMA_8B.hidden * LLAMA_8B.inner
    assert read["int4 down"] == pytest.approx(numbers * (0.5 + 3 / 128), rel=0.01)
    assert read["rows down"] == pytest.approx(numbers, rel=0.01)
    assert narrow_work.weight_bytes("mxfp4", 320) == 170
