"""Every way to code a checkpoint, dense and with experts: its logits against those of its dequantized twin."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.layers.mlp import GatedMlp
from services.worker.layers.moe import MoeMlp
from services.worker.quant.contract import ExpertWeights
from tests.services.worker.quant.coded_checkpoints import DENSE, MOE, write_pair
from tests.services.worker.quant.kinds import KINDS
from tests.services.worker.quant.loading import load, logits

MODELS = {"dense": DENSE, "experts": MOE}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_twin(name: str, model: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    paths = write_pair(tmp_path, MODELS[model], kind)
    (found, _), (twin, _) = (load(path) for path in paths)
    for ours, theirs in zip(found.layers, twin.layers, strict=True):
        pairs: list[Any] = [
            (ours.attention.project, theirs.attention.project),
            (ours.attention.out, theirs.attention.out),
        ]
        if isinstance(ours.mlp, GatedMlp) and isinstance(theirs.mlp, GatedMlp):
            pairs += [(ours.mlp.gate_up, theirs.mlp.gate_up), (ours.mlp.down, theirs.mlp.down)]
        for left, right in pairs:
            assert left.weight.format_name == kind.form, "kept as it is coded"
            torch.testing.assert_close(left.weight.dequantize(), right.weight.dequantize(), rtol=1e-6, atol=1e-7)
        if isinstance(ours.mlp, MoeMlp) and isinstance(theirs.mlp, MoeMlp):
            assert ours.mlp.experts.format_name == (kind.form if kind.experts else "none")
            results = [moved_by(mlp.experts) for mlp in (ours.mlp, theirs.mlp)]
            assert distance(*results) < (2e-5 if kind.exact else 0.06)
    far = distance(logits(found), logits(twin))
    # a router whose input is rounded chooses others now and then
    assert far < (2e-5 if kind.exact else 0.12 if model == "dense" else 0.5)
    assert kind.exact or far > 1e-4, "activations are rounded"


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def moved_by(experts: ExpertWeights) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    residual, x = torch.zeros(9, 128), torch.randn(9, 128, generator=generator)
    chosen = torch.rand(9, 4, generator=generator).topk(2).indices.to(torch.int32)
    experts.add_to(residual, x, torch.rand(9, 2, generator=generator), chosen)
    return residual


@pytest.mark.parametrize(("name", "few"), [("awq", "int4"), ("compressed_int4", "int4"), ("gptq_ordered", "")])
def test_a_cpu_takes_its_fastest_form(name: str, few: str, tmp_path: Path) -> None:
    """Four bits for few rows where groups are in order, else half width; experts stay as they are."""
    coded, twin = write_pair(tmp_path, MOE, KINDS[name])
    (found, _), (wide, _) = load(coded, dtype="auto"), load(twin)
    layer = found.layers[0]
    made = layer.attention.project.weight.format_name
    assert made.startswith(few + "+") if few else "int4" not in made
    assert isinstance(layer.mlp, MoeMlp)
    assert layer.mlp.experts.format_name == ("int4" if few else "none")
    weight, dense = layer.attention.project.weight, wide.layers[0].attention.project.weight
    x = torch.randn(3, 128)
    assert distance(weight.linear(x), dense.linear(x)) < 0.01
