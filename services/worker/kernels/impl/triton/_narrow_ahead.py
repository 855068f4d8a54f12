"""Kernels for narrow weights that are compiled ahead of time: those of a rule's choices, for NVIDIA and for AMD."""

from collections.abc import Sequence

from services.worker.kernels.impl.triton import _narrow_widen
from services.worker.kernels.impl.triton._dense import Device
from services.worker.kernels.impl.triton._launch import AotCase, Constant
from services.worker.kernels.impl.triton._narrow_matrix import narrow_matrix_kernel
from services.worker.kernels.impl.triton._narrow_plan import FOUR_BITS, Plan, rule
from services.worker.kernels.impl.triton._narrow_stream import narrow_stream_kernel
from services.worker.kernels.impl.triton._narrow_vector import narrow_vector_kernel

STORED = {"rows": "fp8e4nv", "blocks": "fp8e4nv", "mxfp8": "fp8e4nv", "int8": "i8", "mxfp4": "u8", "int4": "u8"}
SCALED = {"rows": "fp32", "blocks": "fp32", "mxfp8": "u8", "int8": "fp16", "mxfp4": "u8", "int4": "fp16"}
CODES = {"fp8e4nv": "e4m3", "i8": "int8"}


def aot_cases(
    form: str,
    shapes: Sequence[tuple[int, int]],
    rows: Sequence[int],
    x_type: str = "",
    group: int = 32,
    zeros: bool = False,
    tiled: bool = False,
    activation: str = "",
    experts: int = 0,
    norm: bool = False,
) -> tuple[AotCase, ...]:
    """For (out, inner) of `shapes` and numbers of rows, as the rule chooses for NVIDIA and for AMD.

    x_type: of x, "" for bf16. `experts`: rows are those of one of so many experts.
    """
    x_bytes = {"": 2, "u8": 0}.get(x_type, 1)
    two_scaled = bool(x_type) and form.startswith("mxfp")
    nvidia, amd = ("sm_90",), ("gfx950",) if two_scaled else ("gfx942", "gfx950")
    cases = []
    for out, inner in shapes:
        for limit in rows:
            for targets, device in ((nvidia, Device()), (amd, Device(304, 64, 56 * 1024))):
                asked = "rows8" if limit == 1 and x_type == "i8" else form
                chosen = rule(asked, min(limit, 128), out, inner, group, x_bytes, activation != "", device)
                case = aot_case(form, chosen, inner, x_type, group, zeros, tiled, activation, experts)
                four = form in FOUR_BITS and not x_type
                if targets == nvidia and four and chosen.block_m > 1 and chosen.block_k >= 64:
                    case = case._replace(signature={**case.signature, "weight_ptr": "*i16:16"})
                if norm:
                    case = case._replace(signature={**case.signature, "norm_ptr": "*bf16:16"})
                name = f"{form}{'_t' if tiled else ''}{x_type and '_' + x_type}_{limit}x{inner}x{out}g{group}"
                cases.append(case._replace(name=name + activation, targets=targets, hot=limit <= 64))
    return tuple(cases)


def aot_case(
    form: str,
    chosen: Plan,
    inner: int,
    x_type: str,
    group: int,
    zeros: bool,
    tiled: bool,
    activation: str,
    experts: int,
) -> AotCase:
    vector = chosen.block_m == 1
    stored = "i8" if x_type == "i8" else STORED[form]
    signature: dict[str, Constant] = {
        "x_ptr": f"*{x_type or 'bf16'}:16",
        "x_scales_ptr": f"*{SCALED[form]}:16" if x_type else None,
        "norm_ptr": None,
        "weight_ptr": "*i32:16" if vector else f"*{stored}:16",
        "scales_ptr": f"*{SCALED[form]}:16",
        "zeros_ptr": "*u8:16" if zeros else None,
        "bias_ptr": None,
        "out_ptr": "*bf16:16",
        "eps": "fp32",
        "N": "i32",
        "x_scale_row": "i32",
        "x_scale_block": "i32",
        "K": inner,
        "FORM": form,
        "GROUP": group,
        "ROW_SCALE": True,
        "TILED": tiled,
        "TOP_K": 8 if experts else 1,
        "ADD": False,
        "ACTIVATION": activation,
        "BLOCK_N": chosen.block_n,
        "BLOCK_K": chosen.block_k,
        "PDL": False,
    }
    if vector:
        signature |= {"CODE": CODES.get(stored, form.replace("mxfp4", "e2m1"))}
        if chosen.blocks > 1:
            for name in ("x_scale_row", "x_scale_block", "TOP_K"):
                del signature[name]
            signature["BLOCKS"] = chosen.blocks
            return AotCase("", narrow_stream_kernel, signature, chosen.warps, 1)
        signature["DOTS"] = chosen.dots
        signature["experts_ptr"] = "*i32:16" if experts else None
        return AotCase("", narrow_vector_kernel, signature, chosen.warps, 1)
    if chosen.block_m == 0:
        return _narrow_widen.aot_case(AotCase("", narrow_matrix_kernel, signature))
    signature |= {
        "plan_ptr": "*i32:16" if experts else None,
        "parts_ptr": "*fp32:16" if chosen.parts > 1 else None,
        "arrived_ptr": "*i32:16" if chosen.parts > 1 else None,
        "M": "i32",
        "N": "i32:16",
        "ids_start": "i32",
        "BLOCK_M": chosen.block_m,
        "GROUP_M": chosen.group_m,
        "PARTS": chosen.parts,
        "STAGES": chosen.stages,
        "EXACT": chosen.exact,
        "PLANES": chosen.planes,
        "OUT_PLANES": 0,
    }
    return AotCase("", narrow_matrix_kernel, signature, chosen.warps, chosen.stages)
