"""Weights of coded matrices: those that a checkpoint has, those that GGUF's blocks are, dense ones encoded at load.

Each is a WeightFormat around a CodedFormat. Parts that are fused are one matrix where their blocks line up, else
several that are multiplied one by one. Rows and columns read or added for the sake of whole blocks are taken off.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.quant.coded import NO_MARGINS, Coded, CodedFormat, Codes, Making, Margins
from services.worker.quant.contract import StoredTensor, Weight, WeightFormat
from services.worker.quant.none import fuse
from services.worker.quant.scheme import Scheme

CHUNK = 1 << 22  # numbers encoded at once: a few times as many float32 are needed besides


class JoinedWeight:
    """Matrices with one input, whose outputs lie side by side."""

    fused = None

    def __init__(self, parts: Sequence[Weight]) -> None:
        self.parts = tuple(parts)
        self.out_features = sum(part.out_features for part in parts)
        self.in_features = parts[0].in_features
        self.format_name = "+".join(dict.fromkeys(part.format_name for part in parts))
        self.num_bytes = sum(part.num_bytes for part in parts)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch.cat([part.linear(x) for part in self.parts], dim=1)
        return y if bias is None else y.add_(bias)

    def embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.dequantize())

    def dequantize(self) -> Tensor:
        return torch.cat([part.dequantize() for part in self.parts])


class TrimmedWeight:
    """`whole` has `margins` besides the rows and columns of this weight."""

    fused = None

    def __init__(self, whole: Weight, margins: Margins) -> None:
        self.whole, self.margins = whole, margins
        self.out_features = whole.out_features - margins.top - margins.bottom
        self.in_features = whole.in_features - margins.left - margins.right
        self.format_name, self.num_bytes = whole.format_name, whole.num_bytes

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        top, bottom, left, right = self.margins
        y = self.whole.linear(functional.pad(x, (left, right)) if left or right else x)
        y = y[:, top : top + self.out_features].contiguous() if top or bottom else y
        return y if bias is None else y.add_(bias)

    def embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.dequantize())

    def dequantize(self) -> Tensor:
        top, _, left, _ = self.margins
        wide = self.whole.dequantize()
        return wide[top : top + self.out_features, left : left + self.in_features].contiguous()


class CodedLinears:
    """Of those that the checkpoint has in this format."""

    def __init__(self, form: CodedFormat, making: Making) -> None:
        self.name = form.name
        self._form, self._making = form, making

    def unavailable(self) -> str | None:
        return None

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        for part in parts:
            if not isinstance(part, Coded) or part.format is not self._form:
                return f"{part.name} is stored as {part.storage}"
        return None

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        coded = [part for part in parts if isinstance(part, Coded)]
        pieces = [(part.read(), part.margins, part.shape) for part in coded]
        scheme = coded[0].scheme
        rows = self._form.unit[0]
        if len(pieces) > 1:
            sides = {margins[2:] for _, margins, _ in pieces}
            whole = all(not any(margins[:2]) and not shape[0] % rows for _, margins, shape in pieces)
            joined = self._form.join([codes for codes, _, _ in pieces]) if whole and len(sides) == 1 else None
            if joined is not None:
                shape = (sum(part.shape[0] for part in coded), coded[0].shape[1])
                return self._weight(joined, pieces[0][1], shape, scheme)
            return JoinedWeight([self._weight(*piece, scheme) for piece in pieces])
        return self._weight(*pieces[0], scheme)

    def _weight(self, codes: Codes, margins: Margins, shape: tuple[int, int], scheme: Scheme | None) -> Weight:
        columns = margins.left + shape[1] + margins.right
        return made(self._form, codes, (margins, columns), scheme, self._making)


class BlockLinears:
    """Of GGUF's blocks, as they are stored."""

    def __init__(self, form: CodedFormat, making: Making) -> None:
        self.name = form.name
        self._form, self._making = form, making

    def unavailable(self) -> str | None:
        return None

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        for part in parts:
            if part.storage != parts[0].storage or part.storage not in self._form.block_storages:
                return f"{part.name} is stored as {part.storage}, not as {', '.join(self._form.block_storages)}"
        return None

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        codes = self._form.read_blocks(parts[0].storage, torch.cat([part.blocks() for part in parts]))
        return made(self._form, codes, (NO_MARGINS, parts[0].shape[1]), None, self._making)


class ConvertedLinears:
    """Of any, encoded chunk by chunk when they are read."""

    def __init__(self, form: CodedFormat, making: Making) -> None:
        self.name = form.name
        self._form, self._making = form, making

    def unavailable(self) -> str | None:
        return None

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        return None

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        columns = parts[0].shape[1]
        dense = fuse(parts, self._making.activation, self._making.device)
        rows_unit, columns_unit = self._form.unit
        margins = Margins(bottom=-len(dense) % rows_unit, right=-columns % columns_unit)
        chunks = []
        step = max(CHUNK // columns // 128, 1) * 128
        for begin in range(0, len(dense), step):
            chunk = dense[begin : begin + step].float()
            last = margins.bottom if begin + step >= len(dense) else 0
            chunks.append(self._form.encode(functional.pad(chunk, (0, margins.right, 0, last))))
        del dense
        codes = self._form.join(chunks)
        assert codes is not None, "no part of a matrix differs from another in what makes them unlike"
        return made(self._form, codes, (margins, columns + margins.right), None, self._making)


class MixedFormat:
    """Parts that only other formats keep, each by its own: GGUF files mix types within a layer."""

    name = "mixed"

    def __init__(self, formats: Sequence[WeightFormat]) -> None:
        self._formats = tuple(formats)

    def unavailable(self) -> str | None:
        return None if self._formats else "no other format is there"

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        if len(parts) < 2:
            return "one part is never mixed"
        for part in parts:
            if all(form.refuses([part]) is not None for form in self._formats):
                return f"{part.name} is stored as {part.storage}"
        return None

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        own = [next(form for form in self._formats if form.refuses([part]) is None) for part in parts]
        return JoinedWeight([form.make([part]) for form, part in zip(own, parts, strict=True)])


def made(form: CodedFormat, codes: Codes, frame: tuple[Margins, int], scheme: Scheme | None, making: Making) -> Weight:
    """frame: what was read or added besides, and the columns of x with them. Filled up to whole blocks."""
    margins, columns = frame
    codes, below, beside = form.fill(codes)
    margins = margins._replace(bottom=margins.bottom + below, right=margins.right + beside)
    columns += beside
    codes = Codes(*(None if field is None else field.to(making.device) for field in codes))  # type: ignore[arg-type]
    weight = form.weight(codes, columns, scheme, making)
    return weight if margins == NO_MARGINS else TrimmedWeight(weight, margins)
