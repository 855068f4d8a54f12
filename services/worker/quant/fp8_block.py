"""FP8 (e4m3) with a scale per block of 128 by 128; activations with one per token and 128 columns (DeepSeek-V3)."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.block_scaled_linear import (
    BLOCK,
    block_dequantized,
    block_quantized,
    block_scaled_linear,
)
from services.worker.kernels.ops.moe_block_scaled import moe_block_scaled
from services.worker.kernels.packing.weight_tiles import fits_tiles, plain, tile_weight
from services.worker.quant.coded import COLUMNS, ROWS, SCALES, VALUES, Axis, CodedFormat, Codes, Making, Piece
from services.worker.quant.coded_experts import StackedExperts, takes_tiles
from services.worker.quant.contract import ExpertBiases, ExpertWeights, Weight
from services.worker.quant.forms import NARROW_OPS, ByGroup, CodedWeight, Entered, Stored
from services.worker.quant.fp8 import FLOATS, FP8, native
from services.worker.quant.scheme import BLOCK as PER_BLOCK
from services.worker.quant.scheme import GROUP, Scheme


class Fp8Block(CodedFormat):
    name = "fp8_block"
    ops = (
        "block_scaled_linear",
        "quantize_groups",
        "norm_quantize_groups",
        "silu_quantize_groups",
        "moe_block_scaled",
        *NARROW_OPS,
    )
    unit = (BLOCK, BLOCK)

    def takes(self, scheme: Scheme) -> bool:
        weight, activation = scheme.weight, scheme.activation
        if (weight.kind, weight.per, weight.group) != ("fp8", PER_BLOCK, BLOCK) or activation is None:
            return False
        return activation.dynamic and (activation.kind, activation.per, activation.group) == ("fp8", GROUP, BLOCK)

    def pieces(self, scheme: Scheme) -> Mapping[str, Piece]:
        values, scales, _ = scheme.suffixes
        names = (f"{scales}_inv", scales) if values == "weight" else (scales,)
        return {
            VALUES: Piece((values,), (Axis(ROWS), Axis(COLUMNS)), FP8),
            SCALES: Piece(names, (Axis(ROWS, BLOCK), Axis(COLUMNS, BLOCK)), (*FLOATS, "F8_E8M0")),
        }

    def read(self, scheme: Scheme, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        return Codes(stored[VALUES], stored[SCALES].float())

    def encode(self, values: Tensor) -> Codes:
        return Codes(*block_quantized(values, torch.float8_e4m3fn))

    def decode(self, codes: Codes) -> Tensor:
        rows, columns = codes.values.shape
        wide = codes.scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return codes.values.float() * wide

    def fill(self, codes: Codes) -> tuple[Codes, int, int]:
        below, beside = (-size % BLOCK for size in codes.values.shape)
        if not below and not beside:
            return codes, 0, 0
        # 8-bit floats cannot be padded everywhere; the byte 0 is their 0
        wide = functional.pad(codes.values.view(torch.uint8), (0, beside, 0, below))
        return codes._replace(values=wide.view(codes.values.dtype)), below, beside

    def bytes_per_parameter(self, scheme: Scheme | None = None) -> float:
        return 1.0 + 4 / BLOCK**2

    def weight(self, codes: Codes, columns: int, scheme: Scheme | None, making: Making) -> Weight:
        product = BlockScaled(*native(codes.values, codes.scales), making)
        form = ByGroup(product.values.dtype, product.values.dim() != 2, making.bindings)
        return CodedWeight(self.name, (codes.values.shape[0], codes.values.shape[1]), form, product, making)

    def experts(self, gate_up: Codes, down: Codes, biases: ExpertBiases | None, making: Making) -> ExpertWeights:
        (up, up_scales), (out, out_scales) = (native(codes.values, codes.scales) for codes in (gate_up, down))
        if takes_tiles(moe_block_scaled, making):
            up, out = tile_weight(up), tile_weight(out)
        return StackedExperts(self.name, making.bindings(moe_block_scaled), (up, up_scales, out, out_scales))


class BlockScaled:
    """`values`: [out, in], or tiles where those are read."""

    def __init__(self, values: Tensor, scales: Tensor, making: Making) -> None:
        tiles = takes_tiles(block_scaled_linear, making) and fits_tiles(*values.shape)
        self.values, self.scales = tile_weight(values) if tiles else values, scales
        self.num_bytes = values.nbytes + scales.nbytes
        self._linear = making.bindings(block_scaled_linear)

    @property
    def stored(self) -> Stored | None:
        return (self.values, self.scales, None) if self.values.dim() == 2 else None

    def __call__(self, entered: Entered, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x, scales = entered
        y = self._linear(x, scales, self.values, self.scales, dtype)
        return y if bias is None else y.add_(bias)

    def dequantize(self) -> Tensor:
        return block_dequantized(plain(self.values), self.scales)


FORMAT = Fp8Block()
