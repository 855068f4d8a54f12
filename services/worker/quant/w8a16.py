"""INT8 in groups of columns, activations as they are (W8A16): GPTQ, compressed-tensors and torchao of 8 bits, GGUF's
Q8_0 and Q6_K. Symmetric only: the op has no zero points."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from services.worker.kernels.ops.int8_linear import decode_int8, int8_linear
from services.worker.kernels.ops.quantize_rows import quantized
from services.worker.kernels.packing.mx import grouped
from services.worker.quant.coded import (
    ALL,
    COLUMNS,
    ROWS,
    SCALES,
    UNUSED,
    VALUES,
    ZEROS,
    Axis,
    CodedFormat,
    Codes,
    Making,
    Piece,
)
from services.worker.quant.contract import ExpertBiases, Weight
from services.worker.quant.forms import NARROW_OPS, CodedWeight, Plain, WidenedProduct
from services.worker.quant.scheme import GROUP, ROW, TENSOR, Scheme
from services.worker.quant.w4a16 import HALVES, IN_GROUPS, check_in_groups
from services.worker.quant.w8a8 import must_be_zero

LANES = 4  # numbers in an int32
MIDDLE = 128
GROUPS = (128, 64, 32, 16)  # of scales that are alike in a row: the largest that divides
Q8_BYTES, Q6_BYTES = 34, 210


class W8A16(CodedFormat):
    name = "int8_weight"
    ops = ("int8_linear", *NARROW_OPS)
    unit = (1, 16)

    def __init__(self) -> None:
        self.block_storages = tuple(READERS)

    def takes(self, scheme: Scheme) -> bool:
        weight = scheme.weight
        known = scheme.names in ("gptq", "compressed-tensors", "torchao")
        shared = (GROUP, ROW, TENSOR) if scheme.names == "torchao" else (GROUP, ROW)
        wanted = known and weight.kind == "int8" and weight.per in shared and weight.symmetric
        return wanted and scheme.activation is None and not scheme.ordered

    def pieces(self, scheme: Scheme) -> Mapping[str, Piece]:
        group = Axis(COLUMNS, scheme.weight.group if scheme.weight.per == GROUP else ALL)
        if scheme.names == "gptq":
            return {
                VALUES: Piece(("qweight",), (Axis(COLUMNS, LANES), Axis(ROWS)), ("I32",)),
                SCALES: Piece(("scales",), (group, Axis(ROWS)), HALVES),
                ZEROS: Piece(("qzeros",), (group, Axis(ROWS, LANES)), ("I32",)),
                IN_GROUPS: Piece(("g_idx",), (Axis(COLUMNS),), ("I32",), optional=True),
            }
        if scheme.names == "torchao":
            values, scales, zeros = scheme.suffixes
            shared = () if scheme.weight.per == TENSOR else (Axis(ROWS), group)
            return {
                VALUES: Piece((values,), (Axis(ROWS), Axis(COLUMNS)), ("I8",)),
                SCALES: Piece((scales,), shared, HALVES),
                ZEROS: Piece((zeros,), shared, ("I8",), optional=True),
            }
        return {
            VALUES: Piece(("weight_packed",), (Axis(ROWS), Axis(COLUMNS, LANES)), ("I32",)),
            SCALES: Piece(("weight_scale",), (Axis(ROWS), group), HALVES),
            UNUSED: Piece(("weight_shape",), (Axis(ROWS, ALL),), ("I64", "I32"), optional=True),
        }

    def read(self, scheme: Scheme, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        if scheme.names == "torchao":
            must_be_zero(stored)
            scales = stored[SCALES].expand(shape[0], -1) if scheme.weight.per == TENSOR else stored[SCALES]
            return Codes(stored[VALUES], scales.contiguous())
        by_row = scheme.names != "gptq"
        words = stored[VALUES] if by_row else stored[VALUES].T.contiguous()
        scales = stored[SCALES] if by_row else stored[SCALES].T.contiguous()
        if ZEROS in stored:
            points = stored[ZEROS].contiguous().view(torch.uint8).int() + int(scheme.zeros_less_one)
            if not bool((points == MIDDLE).all()):
                raise ValueError(f"zero points of 8 bits other than {MIDDLE} are not supported")
        if IN_GROUPS in stored:
            check_in_groups(stored[IN_GROUPS], shape[1] // scales.shape[1])
        return Codes((words.view(torch.uint8) ^ MIDDLE).view(torch.int8), scales)

    def read_blocks(self, storage: str, rows: Tensor) -> Codes:
        return READERS[storage](rows)

    def encode(self, values: Tensor) -> Codes:
        numbers, scales = quantized(grouped(values, self.unit[1]), torch.int8)
        return Codes(numbers.flatten(-2), scales.squeeze(-1))

    def decode(self, codes: Codes) -> Tensor:
        return decode_int8(codes.values, codes.scales)

    def bytes_per_parameter(self, scheme: Scheme | None = None) -> float:
        group = scheme.weight.group if scheme is not None and scheme.weight.group else self.unit[1]
        return 1.0 + 2 / group

    def weight(self, codes: Codes, columns: int, scheme: Scheme | None, making: Making) -> Weight:
        product = WidenedProduct((codes.values, in_groups(codes)), making.bindings(int8_linear), decode_int8)
        return CodedWeight(self.name, (codes.values.shape[0], columns), Plain(), product, making)

    def refuses_experts(self, hidden: int, inner: int, biases: ExpertBiases | None) -> str | None:
        return "no op has experts in INT8 without INT8 activations"


def in_groups(codes: Codes) -> Tensor:
    """Scales of groups, at least two: one for each row says to fused ops that x may be rounded as for W8A8."""
    columns = codes.values.shape[1]
    if codes.scales.shape[1] > 1:
        return codes.scales
    group = next((size for size in GROUPS if columns > size and not columns % size), columns)
    return codes.scales.expand(-1, columns // group).contiguous()


def read_q8_0(rows: Tensor) -> Codes:
    """Blocks of 34 bytes: fp16 d, 32 signed numbers; weight = number * d."""
    blocks = rows.view(len(rows), -1, Q8_BYTES)
    numbers = blocks[..., 2:].contiguous().view(torch.int8)
    return Codes(numbers.flatten(1), blocks[..., :2].contiguous().view(torch.float16).squeeze(-1))


def read_q6_k(rows: Tensor) -> Codes:
    """Blocks of 210 bytes for 16 groups of 16: low halves (128 bytes), two high bits (64), int8 scales (16), fp16 d.

    weight = (number - 32) * (d * scale); in each half of a block 32 bytes of high bits serve four times 32 numbers.
    """
    blocks = rows.view(len(rows), -1, Q6_BYTES)
    low, high = blocks[..., :128].reshape(len(rows), -1, 2, 2, 32), blocks[..., 128:192].reshape(len(rows), -1, 2, 32)
    nibbles = torch.cat((low & 15, low >> 4), dim=-2)  # [rows, blocks, 2, 4, 32]
    bits = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2)
    numbers = (nibbles | bits << 4).view(torch.int8) - 32
    d = blocks[..., 208:].contiguous().view(torch.float16).float()
    return Codes(numbers.flatten(1), (blocks[..., 192:208].contiguous().view(torch.int8).float() * d).flatten(1))


READERS: dict[str, Callable[[Tensor], Codes]] = {"Q8_0": read_q8_0, "Q6_K": read_q6_k}


FORMAT = W8A16()
