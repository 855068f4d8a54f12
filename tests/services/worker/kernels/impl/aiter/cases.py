"""The cases that the provider is driven with, by op: the op's own, and those of the shapes that AITER is built for."""

import torch

from services.worker.kernels.ops.kv_write import make_kv_case
from services.worker.kernels.ops.mla_decode import mla_decode
from services.worker.kernels.ops.mla_expanded import mla_expanded
from services.worker.kernels.ops.mla_prefill import mla_prefill
from services.worker.kernels.ops.moe_int4_whole import moe_int4_whole
from services.worker.kernels.ops.paged_attention import Extras, make_attention_case
from services.worker.kernels.ops.rope_kv_write import make_rope_kv_case
from services.worker.kernels.registry import Case, all_ops

DENSE = (
    "rms_norm",
    "add_rms_norm",
    "linear",
    "add_linear",
    "norm_linear",
    "norm_gated_linear",
    "silu_and_mul",
    "gelu_and_mul",
    "rope",
)
KV_WRITE = (make_kv_case(40, 9, 64, 2, 128), make_kv_case(5, 3, 16, 8, 128, fp8=True), make_kv_case(3, 2, 32, 1, 96))
MIXED = ([1, 1, 30, 1, 9], [90, 17, 30, 64, 200])
ATTENTION = (
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
    make_attention_case("window64", *MIXED, (8, 2, 64), extras=Extras(window=20, sinks=True)),
    make_attention_case("softcap64", *MIXED, (8, 2, 64), extras=Extras(softcap=3.0)),
    make_attention_case("tables", *MIXED, (8, 2, 128), extras=Extras(table_rows=True)),
)


def paged(name: str, heads: tuple[int, int, int], rotary_dim: int = 0, normed: bool = False, fp8: bool = False) -> Case:
    """As the op's cases, with pages of 16 tokens and a name of its own."""
    return make_rope_kv_case(21, *heads, rotary_dim or heads[2], normed, fp8, 16)._replace(name=name)


ROPE_KV_WRITE = (
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
CASES = {name: all_ops()[name].cases for name in DENSE}
CASES |= {"kv_write": KV_WRITE, "rope_kv_write": ROPE_KV_WRITE, "paged_attention": ATTENTION}
SCALED = (
    "add_norm_quantize_groups",
    "add_norm_quantize_rows",
    "argmax",
    "block_scaled_linear",
    "mla_decode",
    "mla_expanded",
    "mla_prefill",
    "moe_block_scaled",
    "moe_int4_whole",
    "moe_mxfp4",
    "moe_mxfp4_paired",
    "moe_mxfp8",
    "moe_route",
    "moe_route_biased",
    "moe_route_grouped",
    "moe_row_scaled",
    "moe_tensor_scaled",
    "moe_tiled",
    "mxfp4_linear",
    "norm_quantize_groups",
    "norm_quantize_mxfp4",
    "norm_quantize_rows",
    "quantize_groups",
    "quantize_mxfp4",
    "quantize_rows",
    "quantize_tensor",
    "row_scaled_linear",
    "silu_quantize_groups",
    "tensor_scaled_linear",
)
CASES |= {name: all_ops()[name].cases for name in SCALED}
CASES["moe_int4_whole"] = moe_int4_whole.cases[1:]  # to encode what the first one is given takes longest
CASES["mla_expanded"] = tuple(case for case in mla_expanded.cases if case.make(torch.float32)[0].shape[2] >= 192)
LATENT = (mla_decode, mla_prefill)
CASES |= {op.name: tuple(c for c in op.cases if c.make(torch.float32)[2].shape[2] == 576) for op in LATENT}
