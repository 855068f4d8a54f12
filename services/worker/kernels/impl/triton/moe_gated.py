"""Experts of a mixture: for a few tokens two launches without sorting, for more a sort and grouped products."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from services.worker.kernels.impl.triton._launch import AotCase, Constant, needs_gpu, options, processors
from services.worker.kernels.impl.triton._moe_few import down_tokens, gate_pairs
from services.worker.kernels.impl.triton._moe_grouped import (
    combine_pairs,
    down_blocks,
    gate_blocks,
)
from services.worker.kernels.impl.triton._moe_plan import (
    Experts,
    Few,
    Grouped,
    Tile,
    amd_grouped,
    choose,
    default_few,
    nvidia_grouped,
)
from services.worker.kernels.impl.triton._moe_sort import (
    CHUNK,
    FEW_PAIRS,
    STEP,
    Sorted,
    count_pairs,
    place_pairs,
    sort_pairs,
)
from services.worker.kernels.impl.triton._moe_wide import down_wide, gate_wide
from services.worker.kernels.ops.moe_gated import moe_gated
from services.worker.kernels.registry import Impl

FLAT = 2  # a tile's `wide`


class Biases(NamedTuple):
    """Of moe_clamped, whose gate goes with them."""

    gate_up: Tensor
    down: Tensor


def run(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor) -> None:
    num_experts, hidden, inner = down.shape
    num_tokens, top_k = experts.shape
    if num_tokens == 0:
        return
    plan = choose(Experts(num_experts, top_k, hidden, inner), num_tokens, x.device, x.dtype)
    run_plan(plan, x, weights, experts, gate_up, down, residual)


def run_plan(
    plan: Few | Grouped,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor,
    biases: Biases | None = None,
) -> None:
    run = run_few if isinstance(plan, Few) else run_grouped
    run(plan, x, weights, experts, gate_up, down, residual, biases)  # type: ignore[arg-type]


def run_few(
    plan: Few,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor,
    biases: Biases | None = None,
) -> None:
    gated = few_up(plan, x, experts, gate_up, biases)
    few_down(plan, gated, weights, experts, down, residual, biases)


def few_up(plan: Few, x: Tensor, experts: Tensor, gate_up: Tensor, biases: Biases | None = None) -> Tensor:
    """The gated of every pair, [T * K, I]."""
    (num_tokens, top_k), (_, double, hidden) = experts.shape, gate_up.shape
    inner = double // 2
    gated = torch.empty(num_tokens * top_k, inner, dtype=x.dtype, device=x.device)
    gate_pairs[(num_tokens * top_k, triton.cdiv(inner, plan.up_rows))](
        x,
        experts,
        gate_up,
        None if biases is None else biases.gate_up,
        gated,
        TOP_K=top_k,
        HIDDEN=hidden,
        INNER=inner,
        CLAMPED=biases is not None,
        BLOCK_I=plan.up_rows,
        CHUNK=plan.up_chunk,
        num_warps=plan.up_warps,
        **options(x.device),
    )
    return gated


def few_down(
    plan: Few,
    gated: Tensor,
    weights: Tensor,
    experts: Tensor,
    down: Tensor,
    residual: Tensor,
    biases: Biases | None = None,
) -> None:
    """Must be the launch right after `few_up` (see `down_tokens`)."""
    (num_tokens, top_k), (_, hidden, inner) = experts.shape, down.shape
    down_tokens[(num_tokens, triton.cdiv(hidden, plan.down_rows))](
        gated,
        weights,
        experts,
        down,
        None if biases is None else biases.down,
        residual,
        TOP_K=top_k,
        TOP_K_PAD=triton.next_power_of_2(top_k),
        HIDDEN=hidden,
        INNER=inner,
        BLOCK_N=plan.down_rows,
        CHUNK=plan.down_chunk,
        EXPERTS=plan.down_experts or triton.next_power_of_2(top_k),
        num_warps=plan.down_warps,
        **options(gated.device),
    )


def run_grouped(
    plan: Grouped,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor,
    biases: Biases | None = None,
) -> None:
    ordered = Sorted(experts, down.shape[0], plan.block_m)
    gated = grouped_up(plan.up, plan.block_m, ordered, x, experts.shape[1], gate_up, biases)
    combine(grouped_down(plan.down, plan.block_m, ordered, gated, down, biases), weights, residual)


def grouped_up(
    tile: Tile, block_m: int, ordered: Sorted, x: Tensor, top_k: int, gate_up: Tensor, biases: Biases | None = None
) -> Tensor:
    """The gated of every place of the blocks, [B * block_m, I]."""
    num_experts, double, hidden = gate_up.shape
    inner = double // 2
    gated = torch.empty(ordered.max_blocks * block_m, inner, dtype=x.dtype, device=x.device)
    constants = _tiling(tile, block_m) | {"BLOCK_I": tile.rows, "CLAMPED": biases is not None, "TOP_K": top_k}
    constants |= {"HIDDEN": hidden, "INNER": inner, "num_warps": tile.warps, **options(x.device)}
    grid = (ordered.max_blocks * triton.cdiv(inner, tile.rows),)
    bias, plan, ends = None if biases is None else biases.gate_up, ordered.plan, (ordered.num_pairs, ordered.ids_start)
    if tile.wide:
        by_pairs = gate_up.view(num_experts, 2, inner, hidden).transpose(1, 2)
        weight = _described(by_pairs, 1, tile.rows, 2, tile.block_k)
        gate_wide[grid](x, weight, bias, plan, gated, *ends, **constants)
    else:
        gate_blocks[grid](x, gate_up, bias, plan, gated, *ends, **constants)
    return gated


def grouped_down(
    tile: Tile, block_m: int, ordered: Sorted, gated: Tensor, down: Tensor, biases: Biases | None = None
) -> Tensor:
    """Each pair's output before its weight, [T * K, N]; gated: as `grouped_up` returns it."""
    _, hidden, inner = down.shape
    out = torch.empty(ordered.num_pairs, hidden, dtype=gated.dtype, device=gated.device)
    constants = _tiling(tile, block_m) | {"BLOCK_N": tile.rows, "HIDDEN": hidden, "INNER": inner}
    constants |= {"num_warps": tile.warps, **options(out.device)}
    tiles = ordered.max_blocks * triton.cdiv(hidden, tile.rows)
    bias, plan, ends = None if biases is None else biases.down, ordered.plan, (ordered.num_pairs, ordered.ids_start)
    if tile.wide:
        main, extra = halves(block_m)
        rows = _described(gated, main, tile.block_k), _described(gated, extra or tile.tail or main, tile.block_k)
        weight, grid = _described(down, 1, tile.rows, tile.block_k), (tiles,)
        if tile.wide == FLAT:
            grid = (min(tiles, processors(out.device, interpreted=2)),)
        down_wide[grid](*rows, weight, bias, plan, out, *ends, FLAT=tile.wide == FLAT, **constants)
    else:
        down_blocks[(tiles,)](gated, down, bias, plan, out, *ends, **constants)
    return out


def _tiling(tile: Tile, block_m: int) -> dict[str, Any]:
    """Constants of both products' kernels."""
    shared = {"BLOCK_K": tile.block_k, "GROUP_M": tile.group_m, "STAGES": tile.stages}
    if not tile.wide:
        return shared | {"BLOCK_M": block_m, "TAIL": tile.tail or block_m}
    main, extra = halves(block_m)
    return shared | {"MAIN": main, "EXTRA": extra, "TAIL": tile.tail}


def halves(block_m: int) -> tuple[int, int]:
    """A block's rows as a power of two and the rest, which is 0 or one, too."""
    main = 1 << (block_m.bit_length() - 1)
    return main, block_m - main


def _described(matrix: Tensor, *block: int) -> TensorDescriptor:
    """Rows must begin at multiples of 16 bytes."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block))


def combine(out: Tensor, weights: Tensor, residual: Tensor) -> None:
    num_tokens, hidden = residual.shape
    block = min(1024, triton.next_power_of_2(hidden))
    combine_pairs[(num_tokens, triton.cdiv(hidden, block))](
        out,
        weights,
        residual,
        TOP_K=weights.shape[1],
        HIDDEN=hidden,
        BLOCK_N=block,
        num_warps=4,
        **options(out.device),
    )


ARGUMENTS: dict[str, Constant] = {
    "x_ptr": "*bf16:16",
    "weight_ptr": "*bf16:16",
    "bias_ptr": None,
    "hidden_ptr": "*bf16:16",
    "out_ptr": "*bf16:16",
    "residual_ptr": "*bf16:16",
    "weights_ptr": "*fp32:16",
    "experts_ptr": "*i32:16",
    "plan_ptr": "*i32:16",
    "counts_ptr": "*i32:16",
    "num_pairs": "i32",
    "num_ids": "i32",
    "ids_start": "i32",
}


def _aot(
    name: str,
    kernel: Any,
    warps: int,
    constants: dict[str, Constant],
    targets: tuple[str, ...] = (),
    hot: bool = True,
) -> AotCase:
    arguments = {key: value for key, value in (ARGUMENTS | constants).items() if key in kernel.arg_names}
    return AotCase(f"{name}_{kernel.__name__}", kernel, arguments | {"PDL": False}, warps, hot=hot, targets=targets)


def _sizes(shape: Experts) -> dict[str, Constant]:
    return {
        "TOP_K": shape.top_k,
        "TOP_K_PAD": shape.top_k,
        "HIDDEN": shape.hidden,
        "INNER": shape.inner,
        "CLAMPED": False,
        "EXPERTS_PAD": shape.num_experts,
    }


def aot_few(name: str, shape: Experts) -> Iterator[AotCase]:
    few = default_few(shape)
    yield _aot(name, gate_pairs, few.up_warps, _sizes(shape) | {"BLOCK_I": few.up_rows, "CHUNK": few.up_chunk})
    yield _aot(
        name,
        down_tokens,
        few.down_warps,
        _sizes(shape) | {"BLOCK_N": few.down_rows, "CHUNK": few.down_chunk, "EXPERTS": few.down_experts or shape.top_k},
    )


def aot_grouped(name: str, shape: Experts, block_m: int) -> Iterator[AotCase]:
    """Blocks of 128 are for prompts only."""
    for targets, plan in ((("sm_90",), nvidia_grouped(block_m)), (("gfx942", "gfx950"), amd_grouped(block_m))):
        for kernel, tile in ((gate_blocks, plan.up), (down_blocks, plan.down)):
            tiling = _tiling(tile, block_m) | {"BLOCK_I": tile.rows, "BLOCK_N": tile.rows}
            yield _aot(f"{name}_m{block_m}", kernel, tile.warps, _sizes(shape) | tiling, targets, hot=block_m < 128)


def aot_wide(name: str, shape: Experts, block_m: int, up: Tile, down: Tile) -> Iterator[AotCase]:
    main, extra = halves(block_m)
    for kernel, tile, box in ((gate_wide, up, f"{up.rows}, 2"), (down_wide, down, f"{down.rows}")):
        operands: dict[str, Constant] = {
            "weight": f"tensordesc<bf16[1, {box}, {tile.block_k}]>",
            "hidden": f"tensordesc<bf16[{main}, {tile.block_k}]>",
            "hidden_more": f"tensordesc<bf16[{extra or tile.tail or main}, {tile.block_k}]>",
            "BLOCK_I": tile.rows,
            "BLOCK_N": tile.rows,
            "FLAT": tile.wide == FLAT,
        }
        constants = _sizes(shape) | _tiling(tile, block_m) | operands
        yield _aot(f"{name}_m{block_m}", kernel, tile.warps, constants, ("sm_90",), hot=False)


QWEN3_30B, MIXTRAL, QWEN3_NEXT = Experts(128, 8, 2048, 768), Experts(8, 2, 4096, 14336), Experts(512, 10, 2048, 512)
AOT: tuple[AotCase, ...] = (
    *aot_few("qwen3_30b_a3b", QWEN3_30B),
    *aot_few("mixtral_8x7b", MIXTRAL),
    _aot("qwen3_30b_a3b", sort_pairs, 8, _sizes(QWEN3_30B) | {"BLOCK_M": 16, "BLOCK_PAD": 16, "CHUNK": FEW_PAIRS}),
    _aot("qwen3_next", count_pairs, 4, _sizes(QWEN3_NEXT) | {"CHUNK": CHUNK}),
    _aot(
        "qwen3_next",
        place_pairs,
        8,
        _sizes(QWEN3_NEXT) | {"BLOCK_M": 128, "CHUNK": CHUNK, "STEP": STEP // 512},
    ),
    _aot("qwen3_30b_a3b", combine_pairs, 4, _sizes(QWEN3_30B) | {"BLOCK_N": 1024}),
    *aot_grouped("qwen3_30b_a3b", QWEN3_30B, 16),
    *aot_grouped("qwen3_30b_a3b", QWEN3_30B, 128),
    *aot_grouped("mixtral_8x7b", MIXTRAL, 128),
    *aot_wide("qwen3_30b_a3b", QWEN3_30B, 192, Tile(128, 64, 8, 8, 4, 64, 1), Tile(256, 64, 8, 8, 4, 64, 1)),
    *aot_wide("qwen3_30b_a3b", QWEN3_30B, 128, Tile(128, 64, 8, 8, 4, 64, 1), Tile(256, 64, 8, 8, 4, 0, FLAT)),
)
IMPL = Impl(moe_gated, "triton", run, needs_gpu)
