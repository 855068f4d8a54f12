"""INT8 with a scale per row, activations in INT8 with a scale per token, both symmetric (W8A8)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.quant.coded import COLUMNS, ROWS, SCALES, VALUES, ZEROS, Axis, CodedFormat, Codes, Making, Piece
from services.worker.quant.contract import ExpertBiases, ExpertWeights, Weight
from services.worker.quant.forms import NARROW_OPS, ByRow, CodedWeight
from services.worker.quant.fp8 import FLOATS, RowScaled, by_row, row_scaled_experts
from services.worker.quant.scheme import ROW, TENSOR, Scheme


class W8A8(CodedFormat):
    name = "int8"
    ops = ("row_scaled_linear", "quantize_rows", "norm_quantize_rows", "moe_row_scaled", *NARROW_OPS)

    def takes(self, scheme: Scheme) -> bool:
        weight, activation = scheme.weight, scheme.activation
        if (weight.kind, weight.symmetric) != ("int8", True) or weight.per not in (TENSOR, ROW) or activation is None:
            return False
        return (activation.kind, activation.per, activation.symmetric, activation.dynamic) == ("int8", ROW, True, True)

    def pieces(self, scheme: Scheme) -> Mapping[str, Piece]:
        values, scales, zeros = scheme.suffixes
        shared = (Axis(ROWS),) if scheme.weight.per == ROW else ()
        return {
            VALUES: Piece((values,), (Axis(ROWS), Axis(COLUMNS)), ("I8",)),
            SCALES: Piece((scales,), shared, FLOATS),
            ZEROS: Piece((zeros,), shared, ("I8", "I32", "I64"), optional=True),
        }

    def read(self, scheme: Scheme, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        must_be_zero(stored)
        return Codes(stored[VALUES], by_row(Codes(stored[VALUES], stored[SCALES].float())))

    def encode(self, values: Tensor) -> Codes:
        return Codes(*quantized(values, torch.int8))

    def decode(self, codes: Codes) -> Tensor:
        return codes.values.float() * codes.scales

    def bytes_per_parameter(self, scheme: Scheme | None = None) -> float:
        return 1.0

    def weight(self, codes: Codes, columns: int, scheme: Scheme | None, making: Making) -> Weight:
        product = RowScaled(codes.values, codes.scales, making)
        shape = (codes.values.shape[0], codes.values.shape[1])
        return CodedWeight(self.name, shape, ByRow(torch.int8, making.bindings), product, making)

    def experts(self, gate_up: Codes, down: Codes, biases: ExpertBiases | None, making: Making) -> ExpertWeights:
        return row_scaled_experts(self.name, gate_up, down, making)


def must_be_zero(stored: Mapping[str, Tensor]) -> None:
    """Zero points that tools write beside symmetric numbers. Raises ValueError for others."""
    if ZEROS in stored and bool(stored[ZEROS].any()):
        raise ValueError("zero points other than 0 are not supported")


FORMAT = W8A8()
