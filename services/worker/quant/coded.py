"""Matrices that a checkpoint keeps as several tensors: numbers, scales, zero points. Checked when they are found, read
alone when they are wanted, whole or a rank's share.

`Coded` is such a matrix as the StoredTensor that the loader hands on; the formats of this folder say which tensors it
consists of (`Piece`) and read them into one canonical form (`Codes`). A share that begins or ends within a block or a
group is read with the rest of it: `margins`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from common.errors import ConfigError
from services.worker.kernels.registry import Bindings
from services.worker.quant.contract import ExpertBiases, ExpertWeights, StoredTensor, Weight
from services.worker.quant.narrow import narrow
from services.worker.quant.scheme import Scheme

ROWS, COLUMNS = 0, 1  # what an axis of a piece runs along
ALL = 1 << 40  # to an entry: however many there are
VALUES, SCALES, ZEROS, ORDER, INPUT_SCALE, UNUSED = "values", "scales", "zeros", "order", "input_scale", "unused"


class Codes(NamedTuple):
    """A coded matrix of `values.shape[0]` rows; what the fields hold is the format's own matter."""

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None  # int64, by column: which column of x it multiplies; x's number of columns: none
    input_scale: Tensor | None = None  # float32 [1]


class Axis(NamedTuple):
    """A dimension of a piece: along the matrix's ROWS or COLUMNS, `per` of them to an entry."""

    of: int
    per: int = 1


class Piece(NamedTuple):
    """One tensor of a coded matrix. `names`: behind the module's, the first that is there. No axes: one number."""

    names: tuple[str, ...]
    axes: tuple[Axis, ...]
    storages: tuple[str, ...]
    optional: bool = False


class Margins(NamedTuple):
    """Rows and columns that were read besides those wanted."""

    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0


NO_MARGINS = Margins()


class Making(NamedTuple):
    """What a format makes weights for."""

    activation: torch.dtype
    device: torch.device
    bindings: Bindings


class CodedFormat:
    """One way to code matrices, and everything that anybody asks about it. Found by name in this folder (`FORMAT`).

    `unit`: rows and columns that a matrix consists of multiples of where it is multiplied; others are padded.
    `block_storages`: GGUF's types that it keeps as they are. `ops`: those that its weights may call, to be tested at
    start. What is not overridden here is not possible, or the rule.
    """

    name = ""
    ops: tuple[str, ...] = ()
    unit = (1, 1)
    block_storages: tuple[str, ...] = ()

    def takes(self, scheme: Scheme) -> bool:
        return False

    def pieces(self, scheme: Scheme) -> Mapping[str, Piece]:
        """By field of Codes."""
        raise NotImplementedError

    def read(self, scheme: Scheme, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        """From the pieces as they are stored; shape: of the matrix, margins included. Raises ValueError."""
        raise NotImplementedError

    def read_blocks(self, storage: str, rows: Tensor) -> Codes:
        """From GGUF's blocks, uint8 [out, bytes of a row]."""
        raise NotImplementedError

    def columns(self, codes: Codes, begin: int, end: int) -> Codes:
        """What multiplies columns begin .. end - 1 of x, of a matrix whose columns have an order."""
        raise NotImplementedError

    def encode(self, values: Tensor) -> Codes:
        """From float32 [out, in] of whole units: conversion at load. No row depends on another unit's."""
        raise NotImplementedError

    def decode(self, codes: Codes) -> Tensor:
        """The float32 matrix [out, in] that is meant, columns as they are stored."""
        raise NotImplementedError

    def join(self, codes: Sequence[Codes]) -> Codes | None:
        """One below the other, each of whole units; None where they cannot be one matrix."""
        first = codes[0]
        orders = [part.order for part in codes]
        if any((o is None) != (orders[0] is None) or (o is not None and not o.equal(orders[0])) for o in orders):  # type: ignore[arg-type]
            return None
        if any((part.zeros is None) != (first.zeros is None) for part in codes):
            return None
        zeros = None if first.zeros is None else torch.cat([part.zeros for part in codes])  # type: ignore[misc]
        values, scales = torch.cat([part.values for part in codes]), torch.cat([part.scales for part in codes])
        return Codes(values, scales, zeros, first.order)

    def fill(self, codes: Codes) -> tuple[Codes, int, int]:
        """With rows and columns up to whole units where the op wants that, and how many were added; they are 0."""
        return codes, 0, 0

    def is_fours(self, scheme: Scheme) -> bool:
        """Whether matrices are also numbers of four bits in groups of 32 (quant/int4.py), for kernels of CPUs."""
        return False

    def fours(self, codes: Codes) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def stackable(self, codes: Codes) -> Codes:
        """With fields whose first dimension is along the rows, for a mixture's stacks."""
        return codes

    def bytes_per_parameter(self, scheme: Scheme | None = None) -> float:
        """Scales included; None: as `encode` makes them."""
        raise NotImplementedError

    def weight(self, codes: Codes, columns: int, scheme: Scheme | None, making: Making) -> Weight:
        """The layout and the op that are best with these bindings. codes: on making.device, of whole units.

        columns: of x, which differ from those of `codes` only where these have an order.
        """
        raise NotImplementedError

    def refuses_experts(self, hidden: int, inner: int, biases: ExpertBiases | None) -> str | None:
        if biases is not None:
            return "experts with biases"
        if hidden % self.unit[1] or inner % self.unit[1]:
            return f"experts of {inner} by {hidden}, no multiples of {self.unit[1]}"
        return None

    def experts(self, gate_up: Codes, down: Codes, biases: ExpertBiases | None, making: Making) -> ExpertWeights:
        """Each field is stacked: [E, ...], gate rows first."""
        raise NotImplementedError


@runtime_checkable
class RawTensor(StoredTensor, Protocol):
    """One that can be had as it is stored."""

    def raw(self) -> Tensor:
        """A new tensor of `shape`, of the dtype of the file."""
        ...


@dataclass(frozen=True, slots=True)
class Coded:
    """A StoredTensor [out, in] of which the checkpoint has pieces, by field of Codes."""

    name: str
    shape: tuple[int, int]
    format: CodedFormat
    scheme: Scheme
    pieces: Mapping[str, tuple[Piece, RawTensor]]
    margins: Margins = NO_MARGINS
    columns: tuple[int, int] | None = None  # of the read matrix, where columns are in no order that can be cut

    @property
    def storage(self) -> str:
        return self.format.name

    @property
    def source(self) -> str:
        return next(iter(self.pieces.values()))[1].source

    def narrow(self, dim: int, begin: int, end: int) -> StoredTensor:
        shape = (end - begin, self.shape[1]) if dim == ROWS else (self.shape[0], end - begin)
        if dim == COLUMNS and ORDER in self.pieces:
            first = self.columns[0] if self.columns else 0
            return replace(self, shape=shape, columns=(first + begin, first + end))
        before, after = self.margins[2 * dim : 2 * dim + 2]
        stored = before + self.shape[dim] + after
        unit = math.lcm(
            *(
                axis.per
                for piece, _ in self.pieces.values()
                for axis in piece.axes
                if (axis.of, axis.per < ALL) == (dim, True)
            )
        )
        first = (before + begin) // unit * unit
        last = min(-(-(before + end) // unit) * unit, stored)
        cut = {role: (piece, _cut(piece, tensor, dim, first, last)) for role, (piece, tensor) in self.pieces.items()}
        own = (before + begin - first, last - before - end)
        margins = Margins(*own, *self.margins[2:]) if dim == ROWS else Margins(*self.margins[:2], *own)
        return replace(self, shape=shape, pieces=cut, margins=margins)

    def read(self) -> Codes:
        """Raises ConfigError for scales that no matrix has."""
        top, bottom, left, right = self.margins
        columns = self.shape[1] if self.columns is None else self.pieces[ORDER][1].shape[0]
        stored = {role: tensor.raw() for role, (_, tensor) in self.pieces.items() if role != UNUSED}
        for role in (SCALES, INPUT_SCALE):
            if role in stored:
                check_scales(stored[role], self.pieces[role][1])
        shape = (top + self.shape[0] + bottom, left + columns + right)
        try:
            codes = self.format.read(self.scheme, stored, shape)
        except ValueError as error:
            raise ConfigError(f'{self.source}: "{self.name}": {error}') from error
        return codes if self.columns is None else self.format.columns(codes, *self.columns)

    def dense(self, dtype: torch.dtype) -> Tensor:
        top, _, left, _ = self.margins
        codes = self.read()
        wide = self.format.decode(codes)
        if codes.order is not None:
            wide = reordered(wide, codes.order, self.shape[1])
        return wide[top : top + self.shape[0], left : left + self.shape[1]].to(dtype).contiguous()

    def blocks(self) -> Tensor:
        raise ValueError(f'tensor "{self.name}" is stored as {self.storage}, not in blocks')


def _cut(piece: Piece, tensor: RawTensor, dim: int, first: int, last: int) -> RawTensor:
    for place, axis in enumerate(piece.axes):
        if axis.of == dim and axis.per < ALL and place < len(tensor.shape):
            cut = narrow(tensor, place, first // axis.per, -(-last // axis.per))
            assert isinstance(cut, RawTensor)
            return cut
    return tensor


def reordered(wide: Tensor, order: Tensor, columns: int) -> Tensor:
    """A matrix [out, in] whose columns multiply x[:, order], as one that multiplies x of so many columns."""
    return wide.new_zeros(len(wide), columns + 1).index_add_(1, order, wide)[:, :columns].contiguous()


def check_scales(scales: Tensor, tensor: StoredTensor) -> None:
    """Raises ConfigError for NaN, infinite, zero or negative scales; exponents are wrong only where they say NaN."""
    if scales.dtype == torch.uint8:
        wrong = bool((scales == 255).any())
        what = "NaN"
    else:
        wide = scales.float()
        wrong = not bool((torch.isfinite(wide) & (wide > 0)).all())
        what = "NaN or infinite" if not bool(torch.isfinite(wide).all()) else "zero or negative"
    if wrong:
        raise ConfigError(f'{tensor.source}: tensor "{tensor.name}" holds scales that are {what}')
