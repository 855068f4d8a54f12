"""FP8 (e4m3) weights with a scale for the matrix or for each row, activations as they are (W8A16): torchao's and
compressed-tensors' weight-only FP8. Nothing is fused: ops that take norm or residual round what enters for many rows.
"""

from collections.abc import Mapping

from torch import Tensor

from services.worker.kernels.ops.fp8_weight_linear import fp8_weight_linear
from services.worker.quant.coded import SCALES, VALUES, CodedFormat, Codes, Making, Piece
from services.worker.quant.contract import ExpertBiases, Weight
from services.worker.quant.forms import CodedWeight, Entered, Plain, Stored
from services.worker.quant.fp8 import by_row, native, scaled_pieces
from services.worker.quant.scheme import ROW, TENSOR, Scheme


class Fp8Weight(CodedFormat):
    name = "fp8_weight"
    ops = ("fp8_weight_linear",)

    def takes(self, scheme: Scheme) -> bool:
        weight = scheme.weight
        wanted = weight.kind == "fp8" and weight.per in (TENSOR, ROW) and weight.symmetric
        return wanted and scheme.activation is None

    def pieces(self, scheme: Scheme) -> Mapping[str, Piece]:
        return scaled_pieces(scheme)

    def read(self, scheme: Scheme, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        return Codes(stored[VALUES], by_row(Codes(stored[VALUES], stored[SCALES].float())))

    def decode(self, codes: Codes) -> Tensor:
        return codes.values.float() * codes.scales

    def bytes_per_parameter(self, scheme: Scheme | None = None) -> float:
        return 1.0

    def weight(self, codes: Codes, columns: int, scheme: Scheme | None, making: Making) -> Weight:
        product = WideProduct(*native(codes.values, codes.scales), making)
        return CodedWeight(self.name, (codes.values.shape[0], columns), Plain(), product, making)

    def refuses_experts(self, hidden: int, inner: int, biases: ExpertBiases | None) -> str | None:
        return "no op has experts in FP8 without FP8 activations"


class WideProduct:
    def __init__(self, values: Tensor, scales: Tensor, making: Making) -> None:
        self.values, self.scales = values, scales
        self.num_bytes = values.nbytes + scales.nbytes
        self._linear = making.bindings(fp8_weight_linear)

    @property
    def stored(self) -> Stored | None:
        return None

    def __call__(self, entered: Entered, bias: Tensor | None, dtype: object) -> Tensor:
        (x,) = entered
        return self._linear(x, self.values, self.scales, bias)

    def dequantize(self) -> Tensor:
        return self.values.float() * self.scales


FORMAT = Fp8Weight()
