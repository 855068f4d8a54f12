"""Ops of narrow weights, routings and latents at a model's shapes: sizes that their formats can have, nothing else."""

import pytest
import torch

from services.worker.kernels.registry import all_ops
from services.worker.kernels.scaled_cases import TABLE, products, scaled_cases

DENSE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}
MIXTURE = {**DENSE, "intermediate_size": 0, "num_experts": 4, "top_k": 2, "expert_size": 256}
ODD = {**DENSE, "hidden_size": 200, "intermediate_size": 120}


@pytest.mark.parametrize("op", TABLE)
def test_every_meaning_takes_its_cases(op: str) -> None:
    for shapes in (DENSE, MIXTURE, ODD):
        for case in scaled_cases(op, shapes, (1, 9)):
            all_ops()[op].meaning(*case.make(torch.bfloat16))
    assert scaled_cases(op, MIXTURE if op.startswith("moe") else DENSE, (1, 9)), "a model of whole blocks has some"


def test_products_are_those_of_a_layer() -> None:
    assert products(DENSE, 128) == [(256, 512), (256, 256), (256, 768), (384, 256)]
    assert products(DENSE, 256) == [(256, 512), (256, 256), (256, 768)]
    assert products(MIXTURE, 1) == [(256, 512), (256, 256)]
    assert products(ODD, 128) == []


def test_mixtures_are_tried_at_sizes_that_have_failed_elsewhere() -> None:
    names = [case.name.partition("x")[0] for case in scaled_cases("moe_block_scaled", MIXTURE, (1, 1024))]
    assert names == ["1", "304", "336", "1024"]
    assert scaled_cases("moe_block_scaled", DENSE, (1,)) == () == scaled_cases("linear", DENSE, (1,))
    assert scaled_cases("moe_block_scaled", {**MIXTURE, "expert_size": 96}, (1,)) == (), "no whole blocks of 128"


def test_latents_by_the_models_heads() -> None:
    assert [case.name for case in scaled_cases("mla_decode", DENSE, (1, 9))] == ["1x1x777h4", "9x1x777h4"]
    assert [case.name for case in scaled_cases("mla_prefill", DENSE, (64,))] == ["1x64x841h4"]
    assert scaled_cases("mla_decode", {**DENSE, "num_heads": 200}, (1,))[0].name == "1x1x777h128"
