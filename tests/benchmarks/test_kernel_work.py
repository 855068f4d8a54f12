"""The arguments are what the ops take, and torch's best way means the same: on small models, on the CPU."""

from typing import Any

import pytest
import torch

from benchmarks import kernel_work
from benchmarks.gate import convert, outcome
from benchmarks.kernel_work import Work, works
from benchmarks.shapes import MODELS, ModelShape
from services.worker.kernels.registry import all_ops

DENSE = ModelShape("dense", 2, 64, 4, 2, 32, 96, 300, qk_norm=True)
MIXED = ModelShape("mixed", 2, 64, 4, 2, 32, 48, 300, experts=8, top_k=2)
DRAWN = ("draw", "sample")  # by other random numbers
OTHER = ("keep_floor", "rms_norm", "moe_route")  # less, another form, or another rounding


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_work, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_work, "PROMPT", 20)
    monkeypatch.setattr(kernel_work, "MOST_ROWS", 4)
    monkeypatch.setattr(kernel_work, "CONTEXT", 32)
    monkeypatch.setattr(kernel_work, "BLOCK_TOKENS", 4)
    torch.manual_seed(1)


def results(work: Work, arguments: tuple[Any, ...], run: Any) -> list[torch.Tensor]:
    given = convert(arguments, torch.clone)
    return list(outcome(run(*given), given).values())


@pytest.mark.parametrize("model", [DENSE, MIXED], ids=lambda model: model.name)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_arguments_fit_and_torchs_way_agrees(model: ModelShape, tokens: int) -> None:
    seen = set()
    for work in works(model, tokens):
        seen.add(work.op)
        arguments = work.make()
        wanted = results(work, arguments, all_ops()[work.op].meaning)
        assert work.num_bytes > 0
        if work.op in DRAWN or work.op in OTHER or work.torch_best is None:
            continue
        if work.prepare is not None:
            got = work.torch_best(*work.prepare(*arguments))
            got, wanted = [got.transpose(1, 2).flatten(0, 1)], wanted[:1]
        else:
            got = results(work, arguments, work.torch_best)
        if work.op == "moe_gated":
            got, wanted = got[-1:], wanted[-1:]
        for left, right in zip(got[:1], wanted[:1], strict=True):
            torch.testing.assert_close(left.float(), right.float(), rtol=3e-2, atol=8e-2, msg=work.key)
    assert {"norm_linear", "add_linear", "rope_kv_write", "paged_attention", "rms_norm"} <= seen
    assert ("moe_gated" in seen) == bool(model.experts)


def test_a_decode_step_reads_at_least_the_weights_and_the_cache() -> None:
    """Against the closed form: the works of a step lie a little above it, by their activations."""
    kernel_work.MOST_ROWS = 512
    for model in MODELS:
        parts = [work for work in works(model, 1) if work.per_step]
        total = sum(work.num_bytes * work.per_step for work in parts)
        active = model.hidden * (
            model.qkv_width + model.q_width + 3 * model.inner * max(model.top_k, 1) + model.experts
        )
        least = 2 * model.layers * (active + kernel_work.CONTEXT * model.kv_elements) + 2 * model.hidden * model.vocab
        assert least < total < 1.02 * least, model.name
