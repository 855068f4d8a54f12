"""Cases of the ops at a model's real shapes, in the sizes of decode steps and of prompts: what the self-test runs.

Pure. Shapes are numbers by name, those of Facts.shapes and more (`SHAPES`). An op that the model never calls has no
cases. An op's own file may have `model_cases(shapes, sizes)` instead of an entry in TABLE. Sampling compares sums with
random numbers, so that another order of a sum may draw another token now and then: `may_differ` says of which ops a few
rows may be others.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from services.worker.kernels.known_bad import suspect_tokens
from services.worker.kernels.ops.add_linear import make_add_linear_case
from services.worker.kernels.ops.add_rms_norm import make_add_norm_case
from services.worker.kernels.ops.argmax import make_argmax_case
from services.worker.kernels.ops.draw import make_draw_case
from services.worker.kernels.ops.embedding import make_embedding_case
from services.worker.kernels.ops.grouped_linear import make_grouped_case
from services.worker.kernels.ops.kv_write import make_kv_case
from services.worker.kernels.ops.linear import make_linear_case
from services.worker.kernels.ops.moe_gated import make_moe_case
from services.worker.kernels.ops.moe_route import make_route_case
from services.worker.kernels.ops.norm_gated_linear import make_gated_case
from services.worker.kernels.ops.norm_linear import make_norm_linear_case
from services.worker.kernels.ops.norm_route import make_norm_route_case
from services.worker.kernels.ops.paged_attention import Extras, make_attention_case
from services.worker.kernels.ops.rms_norm import make_norm_case
from services.worker.kernels.ops.rope import make_rope_case
from services.worker.kernels.ops.rope_kv_write import make_rope_kv_case
from services.worker.kernels.ops.silu_and_mul import make_silu_case
from services.worker.kernels.registry import Case, Op, Sizes
from services.worker.kernels.scaled_cases import scaled_cases

SHAPES = (
    *("hidden_size", "intermediate_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    *("block_tokens", "kv_fp8", "qkv_bias", "out_bias", "qk_norm", "num_experts", "top_k", "expert_size"),
    *("renormalize", "max_rows", "step_tokens", "window", "sinks", "clamped", "gelu"),
    *("value_dim", "attention_gate", "shared_size"),
    *("delta_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "delta_taps", "delta_drafts"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_row"),
    *("expert_groups", "top_groups", "softmax_groups", "index_heads", "index_head_dim", "index_top_k"),
    "uncalled",  # 1: cases also of ops that this model does not call; an op's name, 1: this one is called
)
# Their own cases say it all: they depend on no model, or on its vocabulary only.
OWN = (
    *("gather_tokens", "store_tokens", "penalize", "mask_logits", "sample", "top_k_floor", "top_p_floor", "keep_floor"),
    "token_logprobs",
)
MIXTURE = ("moe_gated", "moe_route", "norm_route")
BY_HEADS = ("rope", "rope_kv_write", "kv_write", "paged_attention")  # latent attention calls none of them
# What a captured decode step calls; these are also captured and replayed.
CAPTURED: tuple[str, ...] = (
    *("gather_tokens", "embedding", "rms_norm", "linear", "norm_linear", "add_linear", "norm_gated_linear"),
    *(
        "rope_kv_write",
        "paged_attention",
        "causal_conv",
        "gated_delta",
        "gated_rms_norm",
        "sigmoid_gate",
        "shared_expert_gate",
        "latent_write",
        "mla_decode",
        "index_write",
        "index_scores",
        "index_best",
        "norm_route",
        "moe_gated",
        "moe_clamped",
        "moe_tiled",
        "silu_and_mul",
        "draw",
        "store_tokens",
    ),
)
CAPTURED += (
    *(
        "norm_narrow_linear",
        "norm_gated_narrow_linear",
        "add_narrow_linear",
        "row_scaled_linear",
        "block_scaled_linear",
    ),
    *("int4_linear", "mxfp4_weight_linear", "quantize_rows", "quantize_groups", "norm_quantize_rows", "moe_row_scaled"),
    *("moe_block_scaled", "moe_int4", "moe_int4_whole", "moe_mxfp4_weight", "moe_mxfp4_paired", "moe_mxfp8"),
)
DRAWN = ("draw", "sample", "top_k_floor", "top_p_floor", "keep_floor")
DECODE_CONTEXT = 777  # tokens: several partitions of any attention kernel, and no whole number of pages


def sizes_of(shapes: Mapping[str, int], device: str) -> Sizes:
    """On a CPU as few as show a difference: tests must not take longer than loading a model."""
    rows, tokens = shapes.get("max_rows", 256), shapes.get("step_tokens", 2048)
    decode, prompt = ((1, 8), (40,)) if device == "cpu" else ((1, 16, 256), (64, 1024))
    return Sizes(tuple(sorted({min(n, rows) for n in decode})), tuple(sorted({min(n, tokens) for n in prompt})))


def real_cases(op: Op[Any], shapes: Mapping[str, int], device: str) -> tuple[Case, ...]:
    """None at all if this model does not call the op, unless the shapes ask for `uncalled` ones too."""
    if not shapes.get("hidden_size") or op.name in OWN:
        return op.cases
    sizes = sizes_of(shapes, device)
    make = TABLE.get(op.name) or getattr(sys.modules[op.meaning.__module__], "model_cases", None)
    called = make is not None and (op.name not in MIXTURE or bool(shapes.get("num_experts")))
    called = called and not (op.name in BY_HEADS and shapes.get("kv_lora_rank"))
    cases = {case.name: case for case in make(shapes, sizes)} if make is not None and called else {}
    if cases or not (shapes.get("uncalled") or shapes.get(op.name)):
        return tuple(cases.values())
    return scaled_cases(op.name, shapes, sizes.all) or op.cases


def may_differ(op: Op[Any]) -> float:
    """Which share of the rows of a result may be another one's: choices whose sums differ in the last bit."""
    return 0.05 if op.name in DRAWN else 0.02 if op.name == "norm_route" else 0.0


def _widths(s: Mapping[str, int]) -> tuple[int, int]:
    """Numbers that the output projection takes, and that the projection of the residual stream gives."""
    if latent := s.get("kv_lora_rank"):
        down = s["q_lora_rank"] or s["num_heads"] * (s["qk_nope_head_dim"] + s["qk_rope_head_dim"])
        return s["num_heads"] * s["v_head_dim"], down + latent + s["qk_rope_head_dim"]
    queries, values = s["num_heads"] * s["head_dim"], s.get("value_dim") or s["head_dim"]
    gates = queries if s.get("attention_gate") else 0
    return s["num_heads"] * values, queries + gates + s["num_kv_heads"] * (s["head_dim"] + values)


def _norms(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        yield make_norm_case(tokens, s["hidden_size"])


def _add_norms(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        yield make_add_norm_case(tokens, s["hidden_size"])


def _linears(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    queries, fused = _widths(s)
    for tokens in sizes.all:
        yield make_linear_case(tokens, s["hidden_size"], fused, bool(s.get("qkv_bias")))
        yield make_linear_case(tokens, queries, s["hidden_size"], bool(s.get("out_bias")))
        if inner := s.get("intermediate_size"):
            yield make_linear_case(tokens, s["hidden_size"], 2 * inner, False)
            yield make_linear_case(tokens, inner, s["hidden_size"], False)
    for rows in sizes.decode:
        yield make_linear_case(rows, s["hidden_size"], s["vocab_size"], False)


def _norm_linears(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        yield make_norm_linear_case(tokens, s["hidden_size"], _widths(s)[1], bool(s.get("qkv_bias")))
    for rows in sizes.decode:
        yield make_norm_linear_case(rows, s["hidden_size"], s["vocab_size"])


def _add_linears(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        yield make_add_linear_case(tokens, _widths(s)[0], s["hidden_size"], bool(s.get("out_bias")))
        if inner := s.get("intermediate_size"):
            yield make_add_linear_case(tokens, inner, s["hidden_size"])


def _gated(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all if s.get("intermediate_size") else ():
        gate = "gelu_tanh" if s.get("gelu") else "silu"
        yield make_gated_case(tokens, s["hidden_size"], s["intermediate_size"], gate)


def _gates(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        yield make_silu_case(tokens, s.get("intermediate_size") or s["expert_size"])


def _grouped(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        for inner, outer in ((s["hidden_size"], _widths(s)[1]), (s["intermediate_size"], s["hidden_size"])):
            if inner % 32 == 0 and inner:
                yield make_grouped_case(tokens, inner, outer, 4)
                yield make_grouped_case(tokens, inner, outer, 8)


def _embeddings(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        yield make_embedding_case(tokens, s["vocab_size"], s["hidden_size"])


def _ropes(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        yield make_rope_case(tokens, s["num_heads"] + s["num_kv_heads"], s["head_dim"], s["rotary_dim"])


def _rope_writes(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        sizes_of_heads = s["head_dim"], s.get("value_dim") or s["head_dim"]
        heads = s["num_heads"], s["num_kv_heads"], sizes_of_heads, s["rotary_dim"]
        yield make_rope_kv_case(tokens, *heads, bool(s.get("qk_norm")), s.get("kv_fp8", 0), s["block_tokens"])


def _writes(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        blocks = -(-tokens // s["block_tokens"]) + 3
        heads = s["num_kv_heads"], s["head_dim"]
        yield make_kv_case(tokens, blocks, s["block_tokens"], *heads, s.get("kv_fp8", 0))


def _attentions(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    heads = s["num_heads"], s["num_kv_heads"], s["head_dim"]
    extras = Extras(s["block_tokens"], s.get("window", 0), sinks=bool(s.get("sinks")), fp8=s.get("kv_fp8", 0))
    extras = extras._replace(value_dim=s.get("value_dim", 0))

    def case(name: str, counts: Sequence[int], context: Sequence[int]) -> Case:
        return make_attention_case(name, counts, context, heads, extras=extras)

    for rows in sizes.decode:
        context = [1 + (DECODE_CONTEXT * (7 * row + 1)) % (DECODE_CONTEXT + row) for row in range(rows)]
        yield case(f"decode{rows}", [1] * rows, [max(context[0], DECODE_CONTEXT), *context[1:]])
    for tokens in sizes.prompt:
        yield case(f"prompt{tokens}", [tokens], [tokens])
        yield case(f"chunk{tokens}", [tokens], [tokens + DECODE_CONTEXT])
        yield case(f"mixed{tokens}", [1, 1, tokens], [DECODE_CONTEXT, 5, tokens])


def _routes(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        yield make_route_case(tokens, s["num_experts"], s["top_k"], bool(s.get("renormalize")))


def _norm_routes(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.all:
        shape = s["hidden_size"], s["num_experts"], s["top_k"]
        yield make_norm_route_case(tokens, *shape, bool(s.get("renormalize")), bool(s.get("clamped")))


def _mixtures(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for tokens in () if s.get("clamped") else sorted({*sizes.all, *suspect_tokens("moe_gated", sizes.all[-1])}):
        yield make_moe_case(tokens, s["num_experts"], s["top_k"], s["hidden_size"], s["expert_size"])


def _greedy(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.decode:
        yield make_argmax_case(rows, s["vocab_size"])


def _draws(s: Mapping[str, int], sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.decode:
        yield make_draw_case(rows, s["vocab_size"])


TABLE: Mapping[str, Callable[[Mapping[str, int], Sizes], Iterator[Case]]] = {
    "rms_norm": _norms,
    "add_rms_norm": _add_norms,
    "linear": _linears,
    "norm_linear": _norm_linears,
    "add_linear": _add_linears,
    "norm_gated_linear": _gated,
    "silu_and_mul": _gates,
    "gelu_and_mul": _gates,
    "grouped_linear": _grouped,
    "embedding": _embeddings,
    "rope": _ropes,
    "rope_kv_write": _rope_writes,
    "kv_write": _writes,
    "paged_attention": _attentions,
    "moe_route": _routes,
    "norm_route": _norm_routes,
    "moe_gated": _mixtures,
    "argmax": _greedy,
    "draw": _draws,
}
