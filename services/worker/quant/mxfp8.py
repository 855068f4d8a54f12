"""MXFP8 (OCP MX 1.0): e4m3 with a power of two per 32 columns, activations likewise."""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.worker.kernels.ops.moe_mxfp8 import moe_mxfp8
from services.worker.kernels.ops.mxfp8_linear import mxfp8_linear
from services.worker.kernels.packing.fnuz import native_fp8, to_fnuz
from services.worker.kernels.packing.mx import GROUP, decode_mxfp8, encode_mxfp8
from services.worker.quant.coded import COLUMNS, ROWS, SCALES, VALUES, Axis, CodedFormat, Codes, Making, Piece
from services.worker.quant.coded_experts import StackedExperts
from services.worker.quant.contract import ExpertBiases, ExpertWeights, Weight
from services.worker.quant.forms import CodedWeight, Entered, Mxfp8, Stored
from services.worker.quant.fp8 import FP8
from services.worker.quant.scheme import GROUP as PER_GROUP
from services.worker.quant.scheme import Scheme

EXPONENTS = ("U8", "F8_E8M0")


class Mxfp8Format(CodedFormat):
    name = "mxfp8"
    ops = ("mxfp8_linear", "quantize_mxfp8", "moe_mxfp8")
    unit = (1, GROUP)

    def takes(self, scheme: Scheme) -> bool:
        weight, activation = scheme.weight, scheme.activation
        wanted = ("fp8", PER_GROUP, GROUP)
        if (weight.kind, weight.per, weight.group) != wanted or not weight.powers or activation is None:
            return False
        return activation.dynamic and (activation.kind, activation.per, activation.group) == wanted

    def pieces(self, scheme: Scheme) -> Mapping[str, Piece]:
        return {
            VALUES: Piece(("weight",), (Axis(ROWS), Axis(COLUMNS)), FP8),
            SCALES: Piece(("weight_scale", "weight_scale_inv"), (Axis(ROWS), Axis(COLUMNS, GROUP)), EXPONENTS),
        }

    def read(self, scheme: Scheme, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        return Codes(stored[VALUES], stored[SCALES].view(torch.uint8))

    def encode(self, values: Tensor) -> Codes:
        return Codes(*encode_mxfp8(values, torch.float8_e4m3fn))

    def decode(self, codes: Codes) -> Tensor:
        return decode_mxfp8(codes.values, codes.scales)

    def bytes_per_parameter(self, scheme: Scheme | None = None) -> float:
        return 1.0 + 1 / GROUP

    def weight(self, codes: Codes, columns: int, scheme: Scheme | None, making: Making) -> Weight:
        product = Mxfp8Product(*native(codes), making)
        form = Mxfp8(product.values.dtype, making.bindings)
        return CodedWeight(self.name, (codes.values.shape[0], codes.values.shape[1]), form, product, making)

    def experts(self, gate_up: Codes, down: Codes, biases: ExpertBiases | None, making: Making) -> ExpertWeights:
        return StackedExperts(self.name, making.bindings(moe_mxfp8), (*native(gate_up), *native(down)))


def native(codes: Codes) -> tuple[Tensor, Tensor]:
    """As this GPU multiplies fp8: twice a power of two is the next one."""
    if native_fp8() != torch.float8_e4m3fnuz:
        return codes.values, codes.scales
    return to_fnuz(codes.values, codes.scales)[0], codes.scales + 1


class Mxfp8Product:
    def __init__(self, values: Tensor, scales: Tensor, making: Making) -> None:
        self.values, self.scales = values, scales
        self.num_bytes = values.nbytes + scales.nbytes
        self._linear = making.bindings(mxfp8_linear)

    @property
    def stored(self) -> Stored | None:
        return None

    def __call__(self, entered: Entered, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x, scales = entered
        return self._linear(x, scales, self.values, self.scales, bias, dtype)

    def dequantize(self) -> Tensor:
        return decode_mxfp8(self.values, self.scales)


FORMAT = Mxfp8Format()
