"""Every op has cases at a model's shapes, which its meaning takes; sizes are those of decode steps and prompts."""

import pytest
import torch

from services.worker.kernels.ops.draw import draw
from services.worker.kernels.ops.linear import linear, make_linear_case
from services.worker.kernels.ops.moe_gated import moe_gated
from services.worker.kernels.ops.norm_linear import norm_linear
from services.worker.kernels.ops.paged_attention import paged_attention
from services.worker.kernels.ops.penalize import penalize
from services.worker.kernels.ops.quantize_rows import quantize_rows
from services.worker.kernels.ops.rope_kv_write import rope_kv_write
from services.worker.kernels.real_cases import CAPTURED, DRAWN, OWN, SHAPES, TABLE, may_differ, real_cases, sizes_of
from services.worker.kernels.registry import all_ops

DENSE = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "vocab_size": 300,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rotary_dim": 16,
    "block_tokens": 16,
    "max_rows": 256,
    "step_tokens": 2048,
}
MIXTURE = {**DENSE, "intermediate_size": 0, "num_experts": 8, "top_k": 2, "expert_size": 32, "renormalize": 1}

LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
SPARSE = {**DENSE, **LATENT, "latent_row": 56, "index_heads": 4, "index_head_dim": 16, "index_top_k": 64}


@pytest.mark.parametrize("shapes", [DENSE, MIXTURE, {**DENSE, "kv_fp8": 1, "qk_norm": 1, "qkv_bias": 1}])
def test_every_meaning_takes_its_cases(shapes: dict[str, int]) -> None:
    assert set(shapes) <= set(SHAPES)
    for op in all_ops().values():
        for case in real_cases(op, shapes, "cpu"):
            op.meaning(*case.make(torch.float32))


def test_a_model_that_chooses_tokens_has_cases_of_what_it_calls() -> None:
    assert set(SPARSE) <= set(SHAPES)
    for name in ("latent_write", "index_write", "index_scores", "index_best", "mla_decode", "mla_prefill"):
        cases = real_cases(all_ops()[name], SPARSE, "cpu")
        assert cases, name
        for case in cases:
            all_ops()[name].meaning(*case.make(torch.float32))


def test_shapes_and_sizes_are_the_models() -> None:
    names = [case.name for case in real_cases(norm_linear, DENSE, "cuda")]
    assert names == [
        *(f"{tokens}x96x160" for tokens in (1, 16, 64, 256, 1024)),
        *(f"{rows}x96x300" for rows in (1, 16, 256)),
    ]
    assert [case.name for case in real_cases(linear, DENSE, "cpu")][:2] == ["1x96x160", "1x96x96"]
    q, keys, _, rows, _ = real_cases(paged_attention, DENSE, "cuda")[1].make(torch.bfloat16)
    assert q.shape == (16, 6, 16) and keys.shape[1:] == (16, 2, 16) and max(rows.context_lens) == rows.max_context
    fp8 = real_cases(rope_kv_write, {**DENSE, "kv_fp8": 1}, "cpu")[0].make(torch.float32)
    assert fp8[3].dtype == torch.float8_e4m3fn and fp8[7] is not None


def test_limits_of_the_configuration_are_kept() -> None:
    assert sizes_of({"max_rows": 4, "step_tokens": 48}, "cuda") == ((1, 4), (48,))
    assert sizes_of({}, "cpu").all == (1, 8, 40)


def test_a_mixture_is_tested_at_the_sizes_that_have_failed_elsewhere() -> None:
    names = [case.name.partition("x")[0] for case in real_cases(moe_gated, MIXTURE, "cuda")]
    assert names == ["1", "16", "64", "256", "304", "336", "1024"]
    assert real_cases(moe_gated, DENSE, "cuda") == (), "this model has no mixture"


def test_ops_without_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert real_cases(penalize, DENSE, "cpu") == penalize.cases
    assert real_cases(linear, {}, "cpu") == linear.cases, "where nothing is known of a model"
    assert set(TABLE) | set(CAPTURED) | set(DRAWN) | set(OWN) <= set(all_ops())
    monkeypatch.delitem(TABLE, "linear")  # type: ignore[attr-defined]
    assert real_cases(linear, DENSE, "cpu") == (), "nobody knows whether this model calls it"
    own = [make_linear_case(3, 4, 5, False)]
    monkeypatch.setattr(
        "services.worker.kernels.ops.linear.model_cases", lambda shapes, sizes: iter(own), raising=False
    )
    assert real_cases(linear, DENSE, "cpu") == tuple(own)


def test_ops_that_a_model_does_not_call_have_cases_for_whoever_asks() -> None:
    asked = {**DENSE, "uncalled": 1}
    assert {op.name for op in all_ops().values() if not real_cases(op, asked, "cpu")} == set()
    assert real_cases(moe_gated, asked, "cpu") == moe_gated.cases, "no mixture: small ones"
    assert [case.name for case in real_cases(quantize_rows, asked, "cpu")][:2] == ["1x96", "1x160"], "its own widths"
    assert real_cases(quantize_rows, DENSE, "cpu") == ()
    same = [[case.name for case in real_cases(linear, shapes, "cpu")] for shapes in (DENSE, asked)]
    assert same[0] == same[1], "what it calls is tried as ever"


def test_draws_may_differ_in_a_few_rows() -> None:
    assert may_differ(draw) > 0 == may_differ(linear)


def test_an_op_by_name_is_tested_although_most_models_do_not_call_it() -> None:
    shapes = {**DENSE, "hidden_size": 128, "head_dim": 64, "num_heads": 2}
    assert real_cases(quantize_rows, shapes, "cpu") == ()
    assert [case.name for case in real_cases(quantize_rows, {**shapes, "quantize_rows": 1}, "cpu")][:1] == ["1x128"]
