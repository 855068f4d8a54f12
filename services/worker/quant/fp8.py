"""FP8 (e4m3) with a scale for the whole matrix or for each row; activations with a scale of their own in every step.

One format for both, since parts that are fused bring unlike scales: one for each row says the same. A mixture's
activations have a scale per token, which is finer than what a checkpoint with one for all was made for.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.worker.kernels.ops.moe_row_scaled import moe_row_scaled
from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.ops.row_scaled_linear import row_scaled_linear
from services.worker.kernels.ops.tensor_scaled_linear import tensor_scaled_linear
from services.worker.kernels.packing.fnuz import native_fp8, to_fnuz
from services.worker.kernels.packing.weight_tiles import fits_tiles, plain, tile_weight
from services.worker.quant.coded import (
    COLUMNS,
    INPUT_SCALE,
    ROWS,
    SCALES,
    UNUSED,
    VALUES,
    Axis,
    CodedFormat,
    Codes,
    Making,
    Piece,
)
from services.worker.quant.coded_experts import StackedExperts, takes_tiles
from services.worker.quant.contract import ExpertBiases, ExpertWeights, Weight
from services.worker.quant.forms import NARROW_OPS, ByRow, ByTensor, CodedWeight, Entered, Form, Stored
from services.worker.quant.scheme import ROW, TENSOR, Scheme

FLOATS = ("F32", "F16", "BF16")
FP8 = ("F8_E4M3",)


class Fp8(CodedFormat):
    name = "fp8"
    ops = (
        "row_scaled_linear",
        "tensor_scaled_linear",
        "quantize_rows",
        "quantize_tensor",
        "norm_quantize_rows",
        "moe_row_scaled",
        *NARROW_OPS,
    )

    def takes(self, scheme: Scheme) -> bool:
        weight, activation = scheme.weight, scheme.activation
        if weight.kind != "fp8" or weight.per not in (TENSOR, ROW) or not weight.symmetric or activation is None:
            return False
        return (
            activation.kind == "fp8"
            and activation.per in (TENSOR, ROW)
            and (activation.dynamic or activation.per == TENSOR)
        )

    def pieces(self, scheme: Scheme) -> Mapping[str, Piece]:
        assert scheme.activation is not None
        static = not scheme.activation.dynamic
        return {
            **scaled_pieces(scheme),
            INPUT_SCALE if static else UNUSED: Piece(("input_scale",), (), FLOATS, optional=not static),
        }

    def read(self, scheme: Scheme, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        scales = stored[SCALES].float().reshape(-1)
        scales = scales[:, None] if scheme.weight.per == ROW else scales
        own = stored[INPUT_SCALE].float().reshape(1) if INPUT_SCALE in stored else None
        return Codes(stored[VALUES], scales, input_scale=own)

    def encode(self, values: Tensor) -> Codes:
        return Codes(*quantized(values, torch.float8_e4m3fn))

    def decode(self, codes: Codes) -> Tensor:
        return codes.values.float() * codes.scales

    def join(self, codes: Sequence[Codes]) -> Codes:
        own = [part.input_scale for part in codes if part.input_scale is not None]
        scales = [part.scales for part in codes]
        one = (
            all(part.numel() == 1 and part.dim() == 1 for part in scales) and len({float(part) for part in scales}) == 1
        )
        return Codes(
            torch.cat([part.values for part in codes]),
            scales[0] if one else torch.cat([by_row(part) for part in codes]),
            # all are products of one x: the scale that saturates nobody's
            input_scale=torch.stack(own).amax(0) if own else None,
        )

    def bytes_per_parameter(self, scheme: Scheme | None = None) -> float:
        return 1.0

    def stackable(self, codes: Codes) -> Codes:
        return Codes(codes.values, by_row(codes))

    def weight(self, codes: Codes, columns: int, scheme: Scheme | None, making: Making) -> Weight:
        values, scales = native(codes.values, codes.scales)
        shape, dtype = (values.shape[0], values.shape[1]), values.dtype
        by_tensor = scheme is not None and scheme.activation is not None and scheme.activation.per == TENSOR
        each = scales.dim() == 2
        own = codes.input_scale
        if own is not None and dtype == torch.float8_e4m3fnuz:
            own = own * 2.0
        form: Form = ByTensor(dtype, own, each, making.bindings) if by_tensor else ByRow(dtype, making.bindings)
        if not each and not by_tensor:
            scales = by_row(Codes(values, scales))
        product = RowScaled(values, scales, making) if scales.dim() == 2 else TensorScaled(values, scales, making)
        return CodedWeight(self.name, shape, form, product, making)

    def experts(self, gate_up: Codes, down: Codes, biases: ExpertBiases | None, making: Making) -> ExpertWeights:
        return row_scaled_experts(self.name, gate_up, down, making)


def scaled_pieces(scheme: Scheme) -> dict[str, Piece]:
    """Numbers that are not packed, and one scale for all or for each row."""
    values, scales, _ = scheme.suffixes
    return {
        VALUES: Piece((values,), (Axis(ROWS), Axis(COLUMNS)), FP8),
        SCALES: Piece((scales,), (Axis(ROWS),) if scheme.weight.per == ROW else (), FLOATS),
    }


def by_row(codes: Codes) -> Tensor:
    """Scales float32 [..., out, 1], whether codes have one per row or one for all."""
    return codes.scales.view(-1, 1).expand(codes.values.shape[0], 1).contiguous()


def native(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """As this GPU multiplies fp8."""
    return to_fnuz(values, scales) if native_fp8() == torch.float8_e4m3fnuz else (values, scales)


class RowScaled:
    """Of fp8 or int8. `values`: [out, in], or tiles where those are read."""

    def __init__(self, values: Tensor, scales: Tensor, making: Making) -> None:
        tiles = values.dtype != torch.int8 and takes_tiles(row_scaled_linear, making) and fits_tiles(*values.shape)
        self.values, self.scales = tile_weight(values) if tiles else values, scales
        self.num_bytes = values.nbytes + scales.nbytes
        self._linear = making.bindings(row_scaled_linear)

    @property
    def stored(self) -> Stored | None:
        return (self.values, self.scales, None) if self.values.dim() == 2 else None

    def __call__(self, entered: Entered, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x, scales = entered
        return self._linear(x, scales, self.values, self.scales, bias, dtype)

    def dequantize(self) -> Tensor:
        return plain(self.values).float() * self.scales


class TensorScaled:
    def __init__(self, values: Tensor, scale: Tensor, making: Making) -> None:
        self.values, self.scale = values, scale
        self.num_bytes = values.nbytes + scale.nbytes
        self._linear = making.bindings(tensor_scaled_linear)

    @property
    def stored(self) -> Stored | None:
        return None

    def __call__(self, entered: Entered, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x, scales = entered
        return self._linear(x, scales, self.values, self.scale, bias, dtype)

    def dequantize(self) -> Tensor:
        return self.values.float() * self.scale


def row_scaled_experts(name: str, gate_up: Codes, down: Codes, making: Making) -> ExpertWeights:
    (up, up_scales), (out, out_scales) = (native_rows(codes) for codes in (gate_up, down))
    if takes_tiles(moe_row_scaled, making):
        up, out = tile_weight(up), tile_weight(out)
    return StackedExperts(name, making.bindings(moe_row_scaled), (up, up_scales, out, out_scales))


def native_rows(codes: Codes) -> tuple[Tensor, Tensor]:
    return (codes.values, codes.scales) if codes.values.dtype == torch.int8 else native(codes.values, codes.scales)


FORMAT = Fp8()
