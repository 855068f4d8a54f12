"""A layer's experts whose matrices are coded: stacks filled matrix by matrix, then kept by the format they are in."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.registry import Op
from services.worker.quant.coded import NO_MARGINS, ORDER, Coded, CodedFormat, Codes, Making
from services.worker.quant.contract import ExpertBiases, ExpertWeights, StoredTensor

TILED_BY = "aiter"  # the provider whose products and experts read weights in tiles (kernels/packing/weight_tiles.py)


def takes_tiles(op: Op[Any], making: Making) -> bool:
    return making.bindings.provider(op) == TILED_BY


class StackedExperts:
    """`stacks`: what the op takes between the chosen experts and the residual stream."""

    def __init__(self, name: str, run: Callable[..., None], stacks: Sequence[Tensor | None]) -> None:
        self.format_name, self.stacks, self._run = name, tuple(stacks), run
        kept = [stack for stack in stacks if stack is not None]
        self.num_experts, self.num_bytes = len(kept[0]), sum(stack.nbytes for stack in kept)

    def add_to(self, residual: Tensor, x: Tensor, weights: Tensor, experts: Tensor) -> None:
        self._run(x, weights, experts, *self.stacks, residual)


class CodedExpertFormat:
    """`convert`: dense experts are encoded, else only those are taken which the checkpoint has in this format."""

    def __init__(self, form: CodedFormat, making: Making, convert: bool = False) -> None:
        self.name = form.name
        self._form, self._making, self._convert = form, making, convert

    def refuses(
        self,
        gate_up: Sequence[Sequence[StoredTensor]],
        down: Sequence[StoredTensor],
        biases: ExpertBiases | None = None,
    ) -> str | None:
        hidden, inner = down[0].shape
        for part in [*down, *(part for pair in gate_up for part in pair)] if not self._convert else ():
            if not isinstance(part, Coded) or part.format is not self._form:
                return f"{part.name} is stored as {part.storage}"
            if ORDER in part.pieces:
                return f"the columns of {part.name} are out of order (act-order)"
            if part.margins != NO_MARGINS or part.columns is not None:
                return f"a rank's share of {part.name} does not consist of whole blocks"
        return self._form.refuses_experts(hidden, inner, biases)

    def make(
        self,
        gate_up: Sequence[Sequence[StoredTensor]],
        down: Sequence[StoredTensor],
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:
        ups, outs = Filling(len(down), self._making), Filling(len(down), self._making)
        for pair, out in zip(gate_up, down, strict=True):
            ups.add(*(self._codes(part) for part in pair))
            outs.add(self._codes(out))
        return self._form.experts(ups.codes, outs.codes, biases, self._making)

    def _codes(self, part: StoredTensor) -> Codes:
        if self._convert:
            return self._form.stackable(self._form.encode(part.dense(torch.float32)))
        assert isinstance(part, Coded)
        return self._form.stackable(part.read())


class Filling:
    """Codes of all experts, field by field, [E, ...]; each goes straight to its place."""

    def __init__(self, num_experts: int, making: Making) -> None:
        self._num, self._making, self._done = num_experts, making, 0
        self._stacks: list[Tensor | None] = []

    def add(self, *parts: Codes) -> None:
        """One expert's matrix, of parts one below the other."""
        for place, fields in enumerate(zip(*(part[:3] for part in parts), strict=True)):
            if not self._done:
                self._stacks.append(self._empty(fields))
            stack, begin = self._stacks[place], 0
            for field in fields if stack is not None else ():
                assert stack is not None
                stack[self._done, begin : begin + len(field)].view(torch.uint8).copy_(
                    field.contiguous().view(torch.uint8)
                )
                begin += len(field)
        self._done += 1

    def _empty(self, fields: Sequence[Tensor | None]) -> Tensor | None:
        first = fields[0]
        if first is None:
            return None
        rows = sum(len(field) for field in fields if field is not None)
        return torch.empty((self._num, rows, *first.shape[1:]), dtype=first.dtype, device=self._making.device)

    @property
    def codes(self) -> Codes:
        values, scales, zeros = self._stacks
        assert values is not None and scales is not None
        return Codes(values, scales, zeros)
