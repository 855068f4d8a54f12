"""Cases at a model's shapes of ops that no model here calls yet: weights of 8 and 4 bits, their mixtures, other
routings, latent attention. Pure.

`valence doctor` asks for them (`uncalled` among the shapes), so that every op that is bound has been tried on its host;
a worker's start does not, since building them may take minutes. Caller: real_cases.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from services.worker.kernels.known_bad import suspect_tokens
from services.worker.kernels.ops.add_narrow_linear import make_add_narrow_case
from services.worker.kernels.ops.add_norm_quantize_groups import make_add_norm_groups_case
from services.worker.kernels.ops.add_norm_quantize_rows import make_add_norm_quantize_case
from services.worker.kernels.ops.block_scaled_linear import make_block_case
from services.worker.kernels.ops.fp8_weight_linear import make_fp8_weight_case
from services.worker.kernels.ops.int4_linear import make_int4_case
from services.worker.kernels.ops.int8_linear import make_int8_case
from services.worker.kernels.ops.mla_decode import make_mla_case
from services.worker.kernels.ops.moe_block_scaled import make_block_moe_case
from services.worker.kernels.ops.moe_int4 import make_int4_moe_case
from services.worker.kernels.ops.moe_int4_whole import make_whole_case
from services.worker.kernels.ops.moe_mxfp4 import make_mxfp4_moe_case
from services.worker.kernels.ops.moe_mxfp4_paired import make_paired_case
from services.worker.kernels.ops.moe_mxfp4_weight import make_mxfp4_weight_moe_case
from services.worker.kernels.ops.moe_mxfp8 import make_mxfp8_moe_case
from services.worker.kernels.ops.moe_row_scaled import make_rows_moe_case
from services.worker.kernels.ops.moe_tensor_scaled import make_tensor_moe_case
from services.worker.kernels.ops.mxfp4_linear import make_mxfp4_linear_case
from services.worker.kernels.ops.mxfp4_weight_linear import make_mxfp4_weight_case
from services.worker.kernels.ops.mxfp8_linear import make_mxfp8_case
from services.worker.kernels.ops.norm_gated_narrow_linear import make_gated_narrow_case
from services.worker.kernels.ops.norm_narrow_linear import make_norm_narrow_case
from services.worker.kernels.ops.norm_quantize_groups import make_norm_groups_case
from services.worker.kernels.ops.norm_quantize_mxfp4 import make_norm_mxfp4_case
from services.worker.kernels.ops.norm_quantize_rows import make_norm_quantize_case
from services.worker.kernels.ops.quantize_groups import make_groups_case
from services.worker.kernels.ops.quantize_mxfp4 import make_mxfp4_case
from services.worker.kernels.ops.quantize_rows import make_quantize_case
from services.worker.kernels.ops.row_scaled_linear import make_rows_case
from services.worker.kernels.ops.silu_quantize_groups import make_silu_quantize_case
from services.worker.kernels.ops.tensor_scaled_linear import make_tensor_case
from services.worker.kernels.registry import Case

GROUP = 128  # columns that share a scale
TILE_TOKENS = 256  # of MXFP4's scales
DECODE_CONTEXT = 777
Shapes = Mapping[str, int]
Tokens = Sequence[int]
Maker = Callable[[Shapes, Tokens], Iterator[Case]]


def scaled_cases(op: str, shapes: Shapes, tokens: Tokens) -> tuple[Case, ...]:
    """`tokens`: of the steps to try. None where the model has no such part, or sizes that the format cannot have."""
    make = TABLE.get(op)
    return () if make is None else tuple({case.name: case for case in make(shapes, tokens)}.values())


def products(s: Shapes, multiple: int) -> list[tuple[int, int]]:
    """Columns and rows of a layer's weights, whose sizes are multiples of `multiple`."""
    queries = s["num_heads"] * s["head_dim"]
    fused = queries + 2 * s["num_kv_heads"] * s["head_dim"]
    found = [(s["hidden_size"], fused), (queries, s["hidden_size"])]
    if inner := s.get("intermediate_size"):
        found += [(s["hidden_size"], 2 * inner), (inner, s["hidden_size"])]
    return [both for both in found if not both[0] % multiple and not both[1] % multiple]


def _linears(make: Callable[[int, int, int], Case], multiple: int, s: Shapes, tokens: Tokens) -> Iterator[Case]:
    for count in tokens:
        for columns, rows in products(s, multiple):
            yield make(count, columns, rows)


def _in_tiles(make: Callable[..., Case], multiple: int, s: Shapes, tokens: Tokens) -> Iterator[Case]:
    """Plain, and in tiles."""
    for tiled in (False, True):
        yield from _linears(partial(make, tiled=tiled), multiple, s, tokens)


def _narrow(make: Callable[[int, int, int, str], Case], place: int, s: Shapes, tokens: Tokens) -> Iterator[Case]:
    """The product at `place` of a layer's, in each form that has such sizes; what is gated gives half as many."""
    found = products(s, 1)
    for columns, rows in found[place : place + 1]:
        for form, multiple in (("rows", 16), ("rows8", 16), ("blocks", GROUP), ("int4z", GROUP), ("mxfp4", 32)):
            if not columns % multiple and not rows % multiple:
                for count in tokens:
                    yield make(count, columns, rows // 2 if place == 2 else rows, form)


def _widths(make: Callable[[int, int], Case], multiple: int, s: Shapes, tokens: Tokens) -> Iterator[Case]:
    """What flows into a layer's products."""
    widths = (s["hidden_size"], s["num_heads"] * s["head_dim"], s.get("intermediate_size", 0))
    for count in tokens:
        for width in widths:
            if width and not width % multiple:
                yield make(count, width)


def _streams(make: Callable[[int, int], Case], multiple: int, s: Shapes, tokens: Tokens) -> Iterator[Case]:
    """The residual stream."""
    if not s["hidden_size"] % multiple:
        for count in tokens:
            yield make(count, s["hidden_size"])


def _gates(s: Shapes, tokens: Tokens) -> Iterator[Case]:
    inner = s.get("intermediate_size") or s.get("expert_size", 0)
    if inner and not inner % GROUP:
        for count in tokens:
            yield make_silu_quantize_case(count, inner, False)
            yield make_silu_quantize_case(count, inner, True)


def _tiles_of_scales(
    steps: Callable[..., Iterator[Case]], make: Callable[[int, int], Case], s: Shapes, tokens: Tokens
) -> Iterator[Case]:
    """Whole tiles: what lies in the padding of others is nobody's business."""
    whole = sorted({-(-count // TILE_TOKENS) * TILE_TOKENS for count in tokens})
    return steps(make, 256, s, whole)


def _experts(op: str, make: Callable[..., Case], multiple: int, s: Shapes, tokens: Tokens) -> Iterator[Case]:
    hidden, inner = s["hidden_size"], s.get("expert_size", 0)
    if s.get("num_experts") and not hidden % multiple and not inner % multiple:
        for count in sorted({*tokens, *suspect_tokens(op, tokens[-1])}):
            yield make(count, s["num_experts"], s["top_k"], hidden, inner)


def _latent(prompts: bool, s: Shapes, tokens: Tokens) -> Iterator[Case]:
    """Over latents of 512 and 64 numbers, by as many heads as the model has: AITER has up to 128."""
    heads = min(s["num_heads"], 128)
    for count in tokens:
        if prompts:
            yield make_mla_case((count,), (count + DECODE_CONTEXT,), heads)
        else:
            yield make_mla_case((1,) * count, (DECODE_CONTEXT,) + (33,) * (count - 1), heads)


TABLE: Mapping[str, Maker] = {
    "tensor_scaled_linear": partial(_linears, make_tensor_case, 16),
    "row_scaled_linear": partial(_in_tiles, make_rows_case, 64),
    "block_scaled_linear": partial(_in_tiles, make_block_case, GROUP),
    "mxfp4_linear": partial(_linears, make_mxfp4_linear_case, 256),
    "int4_linear": partial(_linears, make_int4_case, GROUP),
    "int8_linear": partial(_linears, make_int8_case, 32),
    "fp8_weight_linear": partial(_linears, make_fp8_weight_case, 16),
    "mxfp4_weight_linear": partial(_linears, make_mxfp4_weight_case, 32),
    "mxfp8_linear": partial(_linears, make_mxfp8_case, 32),
    "norm_narrow_linear": partial(_narrow, make_norm_narrow_case, 0),
    "add_narrow_linear": partial(_narrow, make_add_narrow_case, 1),
    "norm_gated_narrow_linear": partial(_narrow, make_gated_narrow_case, 2),
    "quantize_mxfp8": partial(_widths, make_quantize_case, 32),
    "quantize_rows": partial(_widths, make_quantize_case, 8),
    "quantize_tensor": partial(_widths, make_quantize_case, 8),
    "quantize_groups": partial(_widths, partial(make_groups_case, group=GROUP, by_column=True), GROUP),
    "quantize_mxfp4": partial(_tiles_of_scales, _widths, make_mxfp4_case),
    "norm_quantize_mxfp4": partial(_tiles_of_scales, _streams, make_norm_mxfp4_case),
    "norm_quantize_rows": partial(_streams, make_norm_quantize_case, 8),
    "add_norm_quantize_rows": partial(_streams, make_add_norm_quantize_case, 8),
    "norm_quantize_groups": partial(_streams, partial(make_norm_groups_case, by_column=True), GROUP),
    "add_norm_quantize_groups": partial(_streams, partial(make_add_norm_groups_case, by_column=True), GROUP),
    "silu_quantize_groups": _gates,
    "moe_row_scaled": partial(_experts, "moe_row_scaled", make_rows_moe_case, 64),
    "moe_tensor_scaled": partial(_experts, "moe_tensor_scaled", make_tensor_moe_case, 64),
    "moe_block_scaled": partial(_experts, "moe_block_scaled", make_block_moe_case, GROUP),
    "moe_mxfp4": partial(_experts, "moe_mxfp4", make_mxfp4_moe_case, 256),
    "moe_int4": partial(_experts, "moe_int4", make_int4_moe_case, GROUP),
    "moe_int4_whole": partial(_experts, "moe_int4_whole", make_whole_case, GROUP),
    "moe_mxfp8": partial(_experts, "moe_mxfp8", make_mxfp8_moe_case, 32),
    "moe_mxfp4_paired": partial(_experts, "moe_mxfp4_paired", make_paired_case, 32),
    "moe_mxfp4_weight": partial(_experts, "moe_mxfp4_weight", make_mxfp4_weight_moe_case, 32),
    "mla_decode": partial(_latent, False),
    "mla_prefill": partial(_latent, True),
}
