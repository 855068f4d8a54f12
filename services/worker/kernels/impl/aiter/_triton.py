"""AITER's Triton kernels under the calls of its compiled ones, for installations without the compiled part.

AITER can be installed so (AITER_TRITON_ONLY=1: no CK, no compilers), and its Triton part alone runs where the rest does
not: in the interpreter, and on GPUs of another maker, which is how the provider is tested. A `Twin` takes what the
compiled function of that name takes. No twins: kernels that return what ours have to write into given memory, and
those for weights in tiles; ops that need them are refused there.
"""

from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function, Twin
from services.worker.kernels.ops.rope import rope


def at(place: str) -> tuple[str, str]:
    """Where releases have it: in folders of aiter.ops.triton, and once without them."""
    module, _, name = place.partition(":")
    return f"aiter.ops.triton.{place}", f"aiter.ops.triton.{module.rpartition('.')[2]}:{name}"


def same(*places: str, needs: tuple[str, ...]) -> Twin:
    """A kernel that is called as the compiled one is."""
    function = Function(*places, needs=needs)
    return Twin(function, function)


RMS_NORM = same(*at("normalization.rmsnorm:rms_norm"), needs=("input", "weight", "epsilon"))
ADD_RMS_NORM = same(
    *at("normalization.rmsnorm:rmsnorm2d_fwd_with_add"),
    needs=("out", "input", "residual_in", "residual_out", "weight", "epsilon"),
)
NORM_QUANTIZE = same(
    *at("normalization.rmsnorm:rmsnorm2d_fwd_with_dynamicquant"),
    needs=("out", "input", "yscale", "weight", "epsilon"),
)
ADD_NORM_QUANTIZE = same(
    *at("normalization.rmsnorm:rmsnorm2d_fwd_with_add_dynamicquant"),
    needs=("out", "input", "residual_in", "residual_out", "yscale", "weight", "epsilon"),
)

_GEMM = Function(*at("gemm.basic.gemm_a16w16:gemm_a16w16"), needs=("x", "w", "bias", "dtype"))
_GEMM_8 = Function(*at("gemm.basic.gemm_a8w8:gemm_a8w8"), needs=("x", "w", "x_scale", "w_scale", "bias", "dtype"))
_GEMM_BLOCKS = Function(
    *at("gemm.basic.gemm_a8w8_blockscale:gemm_a8w8_blockscale"), needs=("x", "w", "x_scale", "w_scale", "dtype")
)
_ROTATE = Function(
    *at("rope.rope:rope_cached_fwd"), needs=("x", "cos", "sin", "rotate_style", "reuse_freqs_front_part", "nope_first")
)
_BY_TOKEN = Function(*at("quant.quant:dynamic_per_token_quant_fp8_i8"), needs=("qx", "x_in", "scale_out"))
_WHOLE = Function(*at("quant.quant:dynamic_per_tensor_quant_fp8_i8"), needs=("qx", "x_in", "scale_out"))
_BY_GROUP = Function(
    *at("quant.fused_fp8_quant:fused_flatten_fp8_group_quant"), needs=("x", "group_size", "dtype_quant")
)
_GATE = Function(*at("activation:fused_silu_mul")[:1], needs=("x", "out"))


def _mm(*, inp: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = _GEMM(x=inp, w=weights, bias=bias, dtype=inp.dtype)
    return result


def _scaled_mm(
    *, inp: Tensor, weights: Tensor, bias: Tensor | None, otype: torch.dtype, scale_a: Tensor, scale_b: Tensor
) -> Tensor:
    """One scale for all of a matrix, which the kernel wants once per row."""
    scales = scale_a.expand(len(inp)).contiguous(), scale_b.expand(len(weights)).contiguous()
    result: Tensor = _GEMM_8(x=inp, w=weights, x_scale=scales[0], w_scale=scales[1], bias=bias, dtype=otype)
    return result


def _gemm_8(
    *, XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    result: Tensor = _GEMM_8(x=XQ, w=WQ, x_scale=x_scale, w_scale=w_scale, bias=bias, dtype=dtype)
    return result


def _gemm_blocks(*, XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = _GEMM_BLOCKS(x=XQ, w=WQ, x_scale=x_scale, w_scale=w_scale, dtype=dtype)
    return result


def _rotate(
    *,
    input: Tensor,  # noqa: A002 AITER's name
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> Tensor:
    """Its blocks are whole heads of a power of two, of which all or half is turned; others are for torch."""
    head_dim, angles = input.shape[-1], cos.shape[-1]
    if head_dim & (head_dim - 1) or angles not in (head_dim // 2, head_dim // 4):
        full = torch.cat((cos, cos), -1)[:, 0], torch.cat((-sin, sin), -1)[:, 0]
        return rope.meaning(input.squeeze(1), *full).unsqueeze(1)
    result: Tensor = _ROTATE(
        x=input,
        cos=cos,
        sin=sin,
        rotate_style=rotate_style,
        reuse_freqs_front_part=reuse_freqs_front_part,
        nope_first=nope_first,
    )
    return result


def _rotate_both(
    *,
    input_x: Tensor,
    input_y: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> tuple[Tensor, Tensor]:
    style: dict[str, Any] = {
        "rotate_style": rotate_style,
        "reuse_freqs_front_part": reuse_freqs_front_part,
        "nope_first": nope_first,
    }
    return _rotate(input=input_x, cos=cos, sin=sin, **style), _rotate(input=input_y, cos=cos, sin=sin, **style)


def _by_token(*, x: Tensor, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    numbers = torch.empty(x.shape, dtype=quant_dtype, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    _BY_TOKEN(qx=numbers, x_in=x, scale_out=scales)
    return numbers, scales


def _whole(*, x: Tensor, quant_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    numbers = torch.empty(x.shape, dtype=quant_dtype, device=x.device)
    scale = torch.zeros(1, dtype=torch.float32, device=x.device)  # it only ever raises it
    _WHOLE(qx=numbers, x_in=x, scale_out=scale)
    return numbers, scale


def _by_group(*, x: Tensor, quant_dtype: torch.dtype, group_size: int, transpose_scale: bool) -> tuple[Tensor, Tensor]:
    """The kernel is for results of several heads, which it joins; here a row is one."""
    numbers, scales = _BY_GROUP(x=x.unsqueeze(1), group_size=group_size, dtype_quant=quant_dtype)
    return numbers, scales.T.contiguous().view(scales.shape) if transpose_scale else scales


def _gate(*, out: Tensor, input: Tensor) -> None:  # noqa: A002 the same
    _GATE(x=input, out=out)


MM, SCALED_MM = Twin(_mm, _GEMM), Twin(_scaled_mm, _GEMM_8)
GEMM_8, GEMM_BLOCKS = Twin(_gemm_8, _GEMM_8), Twin(_gemm_blocks, _GEMM_BLOCKS)
ROTATE, ROTATE_BOTH = Twin(_rotate, _ROTATE), Twin(_rotate_both, _ROTATE)
BY_TOKEN, WHOLE = Twin(_by_token, _BY_TOKEN), Twin(_whole, _WHOLE)
BY_GROUP, GATE = Twin(_by_group, _BY_GROUP), Twin(_gate, _GATE)
