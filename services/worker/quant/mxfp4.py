"""MXFP4 (OCP MX 1.0): e2m1 with a power of two per 32 columns.

Where a provider multiplies FP4 by FP4 (AITER on gfx950) activations are rounded to MXFP4, as the format is meant;
elsewhere weights are widened on their way to the matrix cores and activations stay as they are, which is finer.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.worker.kernels.ops.moe_mxfp4 import moe_mxfp4
from services.worker.kernels.ops.moe_mxfp4_paired import moe_mxfp4_paired, paired
from services.worker.kernels.ops.moe_mxfp4_weight import moe_mxfp4_weight
from services.worker.kernels.ops.mxfp4_linear import mxfp4_linear
from services.worker.kernels.ops.mxfp4_weight_linear import mxfp4_weight_linear
from services.worker.kernels.packing.mx import GROUP, decode_mxfp4, encode_mxfp4, tile_scales, untile_scales
from services.worker.kernels.packing.weight_tiles import fits_tiles, tile_weight, untile_weight
from services.worker.quant.coded import COLUMNS, ROWS, SCALES, VALUES, Axis, CodedFormat, Codes, Making, Piece
from services.worker.quant.coded_experts import StackedExperts
from services.worker.quant.contract import ExpertBiases, ExpertWeights, Weight
from services.worker.quant.forms import NARROW_OPS, CodedWeight, Entered, Mxfp4, Plain, Stored, WidenedProduct
from services.worker.quant.mxfp8 import EXPONENTS
from services.worker.quant.scheme import GROUP as PER_GROUP
from services.worker.quant.scheme import Scheme

FP4_WIDTH = 256  # columns that products of FP4 by FP4 want a multiple of


class Mxfp4Format(CodedFormat):
    name = "mxfp4"
    ops = (
        *("mxfp4_linear", "quantize_mxfp4", "norm_quantize_mxfp4", "mxfp4_weight_linear"),
        *("moe_mxfp4", "moe_mxfp4_paired", "moe_mxfp4_weight", *NARROW_OPS),
    )
    unit = (1, GROUP)

    def takes(self, scheme: Scheme) -> bool:
        weight, activation = scheme.weight, scheme.activation
        wanted = ("fp4", PER_GROUP, GROUP)
        if (weight.kind, weight.per, weight.group) != wanted or not weight.powers:
            return False
        return activation is None or (activation.kind, activation.per, activation.group) == wanted

    def pieces(self, scheme: Scheme) -> Mapping[str, Piece]:
        return {
            VALUES: Piece(("weight_packed", "weight"), (Axis(ROWS), Axis(COLUMNS, 2)), ("U8",)),
            SCALES: Piece(("weight_scale",), (Axis(ROWS), Axis(COLUMNS, GROUP)), EXPONENTS),
        }

    def read(self, scheme: Scheme, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        return Codes(stored[VALUES], stored[SCALES].view(torch.uint8))

    def encode(self, values: Tensor) -> Codes:
        return Codes(*encode_mxfp4(values))

    def decode(self, codes: Codes) -> Tensor:
        return decode_mxfp4(codes.values, codes.scales)

    def bytes_per_parameter(self, scheme: Scheme | None = None) -> float:
        return 0.5 + 1 / GROUP

    def weight(self, codes: Codes, columns: int, scheme: Scheme | None, making: Making) -> Weight:
        out, width = codes.values.shape
        by_fp4 = making.bindings.provider(mxfp4_linear) != "torch"
        if by_fp4 and fits_tiles(out, width) and not width * 2 % FP4_WIDTH:
            product = Fp4ByFp4(codes, making)
            return CodedWeight(self.name, (out, width * 2), Mxfp4(making.bindings), product, making)
        parts = codes.values, codes.scales
        widened = WidenedProduct(parts, making.bindings(mxfp4_weight_linear), decode_mxfp4)
        return CodedWeight(self.name, (out, width * 2), Plain(), widened, making)

    def refuses_experts(self, hidden: int, inner: int, biases: ExpertBiases | None) -> str | None:
        return super().refuses_experts(hidden, inner, None)

    def experts(self, gate_up: Codes, down: Codes, biases: ExpertBiases | None, making: Making) -> ExpertWeights:
        whole = not gate_up.values.shape[2] * 2 % FP4_WIDTH and not down.values.shape[2] * 2 % FP4_WIDTH
        if biases is None and whole and making.bindings.provider(moe_mxfp4) != "torch":
            up, out = ((tile_weight(c.values), tile_scales(c.scales.flatten(0, 1))) for c in (gate_up, down))
            return StackedExperts(self.name, making.bindings(moe_mxfp4), (*up, *out))
        up_bias, down_bias = biases or (None, None)
        if making.bindings.provider(moe_mxfp4_paired) != "torch":
            wide = (None, None) if biases is None else (paired(biases[0]).float(), biases[1].float())
            stacks = (paired(gate_up.values), paired(gate_up.scales), wide[0], down.values, down.scales, wide[1])
            return StackedExperts(self.name, making.bindings(moe_mxfp4_paired), stacks)
        stacks = (gate_up.values, gate_up.scales, up_bias, down.values, down.scales, down_bias)
        return StackedExperts(self.name, making.bindings(moe_mxfp4_weight), stacks)


class Fp4ByFp4:
    """`values`: tiles; `scales`: tiles of another kind."""

    def __init__(self, codes: Codes, making: Making) -> None:
        self.values, self.scales = tile_weight(codes.values), tile_scales(codes.scales)
        self._shape = codes.scales.shape
        self.num_bytes = self.values.nbytes + self.scales.nbytes
        self._linear = making.bindings(mxfp4_linear)

    @property
    def stored(self) -> Stored | None:
        return None

    def __call__(self, entered: Entered, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x, scales = entered
        y = self._linear(x, scales, self.values, self.scales, dtype)
        return y if bias is None else y.add_(bias)

    def dequantize(self) -> Tensor:
        rows, columns = self._shape
        return decode_mxfp4(untile_weight(self.values), untile_scales(self.scales, rows, columns))


FORMAT = Mxfp4Format()
