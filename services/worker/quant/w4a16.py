"""INT4 in groups of columns, activations as they are (W4A16): AWQ, GPTQ with and without act-order, compressed-tensors,
torchao, Quark, GGUF. Canonical: packed as kernels/packing/int4.py says, scales and zero points [out, in / group].

Columns out of order (act-order) are put in the order of their groups, and x after them. A rank's share of such columns
lies in all groups: each group's part is filled up to whole groups of 32, which costs up to half more.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.worker.kernels.ops.int4_linear import int4_linear
from services.worker.kernels.ops.moe_int4 import moe_int4
from services.worker.kernels.ops.moe_int4_whole import moe_int4_whole, pack_rows
from services.worker.kernels.packing.int4 import MIDDLE, decode_int4, pack_int4, unpack_int4
from services.worker.quant.coded import (
    ALL,
    COLUMNS,
    ORDER,
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
from services.worker.quant.coded_experts import StackedExperts
from services.worker.quant.contract import ExpertBiases, ExpertWeights, Weight
from services.worker.quant.forms import NARROW_OPS, CodedWeight, Plain, WidenedProduct
from services.worker.quant.int4 import READERS
from services.worker.quant.scheme import GROUP, ROW, Scheme

LANES = 8  # numbers in an int32
IN_ORDER, AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7), (0, 4, 1, 5, 2, 6, 3, 7)  # by number: which half byte it is in
FINEST = 32
GROUPS = (128, 64, 32)  # of conversion at load: the largest that divides
LARGEST = 15
SMALLEST_HALF = 6e-8  # the least number of fp16 above 0
HALVES = ("F16", "BF16", "F32")
TORCHAO = ("torchao", "torchao-packed")
QUARK = ("quark-int4", "quark-uint4")
TOOLS = ("awq", "gptq", "compressed-tensors", *TORCHAO, *QUARK)
SIGNS = 0x88  # of two signed numbers in a byte


class W4A16(CodedFormat):
    name = "int4"
    ops = ("int4_linear", "moe_int4", "moe_int4_whole", *NARROW_OPS)
    unit = (1, FINEST)
    block_storages = tuple(READERS)

    def takes(self, scheme: Scheme) -> bool:
        weight = scheme.weight
        wanted = weight.kind == "int4" and weight.per in (GROUP, ROW) and scheme.activation is None
        return wanted and scheme.names in TOOLS

    def pieces(self, scheme: Scheme) -> Mapping[str, Piece]:
        weight = scheme.weight
        group = Axis(COLUMNS, weight.group if weight.per == GROUP else ALL)
        if scheme.names in TORCHAO:
            return torchao_pieces(scheme, group)
        if scheme.names in QUARK:
            return quark_pieces(scheme, group)
        if scheme.names == "compressed-tensors":
            found = {
                VALUES: Piece(("weight_packed",), (Axis(ROWS), Axis(COLUMNS, LANES)), ("I32",)),
                SCALES: Piece(("weight_scale",), (Axis(ROWS), group), HALVES),
                UNUSED: Piece(("weight_shape",), (Axis(ROWS, ALL),), ("I64", "I32"), optional=True),
            }
            if not weight.symmetric:
                found[ZEROS] = Piece(("weight_zero_point",), (Axis(ROWS, LANES), group), ("I32",))
            return found | ({ORDER: Piece(("weight_g_idx",), (Axis(COLUMNS),), ("I32",))} if scheme.ordered else {})
        packed = (Axis(COLUMNS), Axis(ROWS, LANES)) if scheme.names == "awq" else (Axis(COLUMNS, LANES), Axis(ROWS))
        found = {
            VALUES: Piece(("qweight",), packed, ("I32",)),
            SCALES: Piece(("scales",), (group, Axis(ROWS)), HALVES),
            ZEROS: Piece(("qzeros",), (group, Axis(ROWS, LANES)), ("I32",)),
        }
        if scheme.names == "gptq":
            found[ORDER if scheme.ordered else IN_GROUPS] = Piece(
                ("g_idx",), (Axis(COLUMNS),), ("I32",), optional=not scheme.ordered
            )
        return found

    def read(self, scheme: Scheme, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        values, zeros = stored[VALUES], stored.get(ZEROS)
        if scheme.names in TORCHAO:
            return read_torchao(values, stored[SCALES], stored[ZEROS])
        if scheme.names in QUARK:
            return read_quark(scheme, values, stored[SCALES], zeros, shape[0])
        if scheme.names == "compressed-tensors":
            numbers, scales = unpack_words(values), stored[SCALES]
            points = None if zeros is None else unpack_words(zeros.T.contiguous()).T
        else:
            order = AWQ_ORDER if scheme.names == "awq" else IN_ORDER
            numbers = unpack_words(values, order).T if scheme.names == "awq" else unpack_words(values.T.contiguous())
            points = None if zeros is None else unpack_words(zeros, order).T + int(scheme.zeros_less_one)
            scales = stored[SCALES].T
        if points is not None:
            points = points[: shape[0]].contiguous()
            points = None if bool((points == MIDDLE).all()) else points
        if IN_GROUPS in stored:
            check_in_groups(stored[IN_GROUPS], shape[1] // scales.shape[1])
        codes = Codes(pack_int4(numbers.contiguous()), scales.contiguous(), points)
        return codes if ORDER not in stored else in_order(codes, numbers, stored[ORDER])

    def read_blocks(self, storage: str, rows: Tensor) -> Codes:
        numbers, scales, offsets = READERS[storage](rows)
        if storage == "Q4_0":
            return Codes(pack_int4(numbers), scales.to(torch.float16))
        # (number - 8) * scale + offset, as (number - zero) * scale; without a scale every number is the offset
        flat = scales == 0
        groups = numbers.view(*scales.shape, -1).masked_fill(flat[..., None], 1)
        zeros = torch.where(flat, 0.0, MIDDLE - offsets / scales)
        scales = torch.where(flat, offsets, scales)
        near = bool(zeros.abs().amax() <= 64)
        return Codes(pack_int4(groups.flatten(1)), scales.to(torch.float16), zeros.to(torch.float16) if near else zeros)

    def columns(self, codes: Codes, begin: int, end: int) -> Codes:
        assert codes.order is not None
        own = (codes.order >= begin) & (codes.order < end)
        group = len(own) // codes.scales.shape[1]
        places, groups = [], []
        for number, members in enumerate(own.view(-1, group)):
            found = members.nonzero().squeeze(1) + number * group
            places.append(torch.cat((found, found.new_full((-len(found) % FINEST,), -1))))
            groups += [number] * (len(places[-1]) // FINEST)
        place, chosen = torch.cat(places), torch.tensor(groups, dtype=torch.int64)
        numbers = unpack_int4(codes.values).index_select(1, place.clamp_min(0))
        order = torch.where(place < 0, end - begin, codes.order[place.clamp_min(0)] - begin)
        zeros = None if codes.zeros is None else codes.zeros.index_select(1, chosen)
        return Codes(pack_int4(numbers), codes.scales.index_select(1, chosen), zeros, order)

    def encode(self, values: Tensor) -> Codes:
        group = next(size for size in GROUPS if not values.shape[1] % size)
        groups = values.view(len(values), -1, group)
        low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
        halves = ((high - low) / LARGEST).clamp_(min=SMALLEST_HALF).to(torch.float16)
        scales = halves.float()
        zeros = (-low / scales).round_().clamp_(0, LARGEST)
        numbers = (groups / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, LARGEST)
        return Codes(pack_int4(numbers.flatten(1)), halves, zeros.to(torch.uint8))

    def decode(self, codes: Codes) -> Tensor:
        return decode_int4(codes.values, codes.scales, codes.zeros)

    def is_fours(self, scheme: Scheme) -> bool:
        return not scheme.ordered and scheme.weight.group % FINEST == 0 and scheme.weight.group > 0

    def fours(self, codes: Codes) -> tuple[Tensor, Tensor, Tensor]:
        repeats = codes.values.shape[1] * 2 // codes.scales.shape[1] // FINEST
        scales = codes.scales.float().repeat_interleave(repeats, 1)
        if codes.zeros is None:
            return unpack_int4(codes.values), scales, torch.zeros_like(scales)
        zeros = codes.zeros.float().repeat_interleave(repeats, 1)
        return unpack_int4(codes.values), scales, (MIDDLE - zeros) * scales

    def stackable(self, codes: Codes) -> Codes:
        """Whether an expert's zero points are all in the middle is no matter of the stack's."""
        middle = torch.full_like(codes.scales, MIDDLE, dtype=torch.uint8) if codes.zeros is None else codes.zeros
        return codes._replace(zeros=middle)

    def join(self, codes: Sequence[Codes]) -> Codes | None:
        mixed = len({part.zeros is None for part in codes}) > 1
        return super().join([self.stackable(part) for part in codes] if mixed else codes)

    def bytes_per_parameter(self, scheme: Scheme | None = None) -> float:
        group = scheme.weight.group if scheme is not None and scheme.weight.group else GROUPS[0]
        return 0.5 + 3 / group

    def weight(self, codes: Codes, columns: int, scheme: Scheme | None, making: Making) -> Weight:
        form = Plain() if codes.order is None else Plain(codes.order, columns)
        parts = codes.values, codes.scales, codes.zeros
        product = WidenedProduct(parts, making.bindings(int4_linear), decode_int4)
        return CodedWeight(self.name, (codes.values.shape[0], columns), form, product, making)

    def experts(self, gate_up: Codes, down: Codes, biases: ExpertBiases | None, making: Making) -> ExpertWeights:
        if making.bindings.provider(moe_int4_whole) != "torch" and are_whole(gate_up, down):
            stacks = ((c.values, c.scales, None if c.zeros is None else pack_rows(c.zeros)) for c in (gate_up, down))
            return StackedExperts(self.name, making.bindings(moe_int4_whole), [each for c in stacks for each in c])
        return StackedExperts(self.name, making.bindings(moe_int4), (*gate_up[:3], *down[:3]))


def are_whole(*stacks: Codes) -> bool:
    """Whether all zero points are whole numbers of four bits: GGUF's are not, and some of GPTQ are 16."""
    zeros = [codes.zeros for codes in stacks if codes.zeros is not None]
    return all(z.dtype == torch.uint8 and not z.shape[1] % 2 and int(z.max()) <= LARGEST for z in zeros)


def torchao_pieces(scheme: Scheme, group: Axis) -> dict[str, Piece]:
    """A number to a byte, with whole zero points; or two, with offsets and scales by column."""
    values, scales, zeros = scheme.suffixes
    is_packed = scheme.names == "torchao-packed"
    shared = (group, Axis(ROWS)) if is_packed else (Axis(ROWS), group)
    return {
        VALUES: Piece((values,), (Axis(ROWS), Axis(COLUMNS, 2 if is_packed else 1)), ("I8",)),
        SCALES: Piece((scales,), shared, HALVES),
        ZEROS: Piece((zeros,), shared, HALVES if is_packed else ("I8",)),
    }


def read_torchao(values: Tensor, scales: Tensor, zeros: Tensor) -> Codes:
    """Signed numbers: (number - zero) * scale; packed ones number * scale + zero, which is no whole number of steps."""
    if zeros.is_floating_point():
        scales, offsets = scales.T.contiguous(), zeros.T.float()
        if not bool(torch.isfinite(offsets).all()):
            raise ValueError("zero points that are NaN or infinite")
        return Codes(values.view(torch.uint8) ^ SIGNS, scales, MIDDLE - offsets / scales.float())
    if any(bool(((part < -MIDDLE) | (part >= MIDDLE)).any()) for part in (values, zeros)):
        raise ValueError("numbers of more than 4 bits")
    points = (zeros + MIDDLE).to(torch.uint8)
    packed = pack_int4((values + MIDDLE).to(torch.uint8))
    return Codes(packed, scales.contiguous(), None if bool((points == MIDDLE).all()) else points)


def quark_pieces(scheme: Scheme, group: Axis) -> dict[str, Piece]:
    """As AWQ's by another name, or by row: numbers, their zero points too, eight to a word in AWQ's order."""
    values, scales, zeros = scheme.suffixes
    grouped = scheme.weight.per == GROUP
    words, shared = (Axis(COLUMNS), Axis(ROWS, LANES)), (group, Axis(ROWS))
    return {
        VALUES: Piece((values,), words if grouped else (Axis(ROWS), Axis(COLUMNS, LANES)), ("I32",)),
        SCALES: Piece((scales,), shared if grouped else (Axis(ROWS),), HALVES),
        ZEROS: Piece((zeros,), (group, Axis(ROWS, LANES)) if grouped else (Axis(ROWS, LANES),), ("I32",)),
    }


def read_quark(scheme: Scheme, values: Tensor, scales: Tensor, zeros: Tensor | None, rows: int) -> Codes:
    """Numbers with a sign, "int4", count from -8, zero points likewise."""
    assert zeros is not None
    numbers, points = unpack_words(values, AWQ_ORDER), unpack_words(zeros, AWQ_ORDER)
    if scheme.weight.per == GROUP:
        numbers, points, scales = numbers.T, points.T, scales.T
    else:
        points, scales = points.view(-1, 1), scales.view(-1, 1)
    points = points[:rows]
    if scheme.names == "quark-int4":
        numbers, points = numbers ^ MIDDLE, points ^ MIDDLE
    middle = bool((points == MIDDLE).all())
    return Codes(pack_int4(numbers.contiguous()), scales.contiguous(), None if middle else points.contiguous())


IN_GROUPS = "in_groups"  # act-order's table in a checkpoint without act-order


def unpack_words(words: Tensor, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """int32 [..., n] as uint8 [..., 8 * n]; `order`: as above."""
    shifts = torch.tensor(order, dtype=torch.int32) * 4
    return ((words[..., None] >> shifts) & LARGEST).to(torch.uint8).flatten(-2)


def check_in_groups(table: Tensor, group: int) -> None:
    wanted = torch.arange(len(table)) // group
    if not torch.equal(table.long() - int(table[0]), wanted):
        raise ValueError("g_idx puts columns out of order, but desc_act is false")


def in_order(codes: Codes, numbers: Tensor, table: Tensor) -> Codes:
    """table: int32 [in], each column's group."""
    groups = codes.scales.shape[1]
    counts = torch.bincount(table.clamp_min(0).long(), minlength=groups)
    if int(table.min()) < 0 or len(counts) > groups or bool((counts != counts[0]).any()):
        raise ValueError(f"g_idx does not put as many columns in each of {groups} groups")
    order = table.argsort(stable=True)
    return codes._replace(values=pack_int4(numbers.index_select(1, order)), order=order)


FORMAT = W4A16()
