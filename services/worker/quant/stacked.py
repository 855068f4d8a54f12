"""Checkpoints that keep all experts of a layer in one tensor: each expert's part as a tensor of its own, read alone.

Dense stacks are [E, in, out], biases [E, out]; in MXFP4 a stack is two: `_blocks` [E, out, in / 32, 16] of two numbers
to a byte, and `_scales` [E, out, in / 32]. Where several matrices share a stack, their outputs lie by turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from common.errors import ConfigError
from services.worker.kernels.packing.mx import GROUP
from services.worker.quant.coded import SCALES, VALUES, Coded
from services.worker.quant.contract import StackedTensor, StoredTensor
from services.worker.quant.mxfp4 import FORMAT as MXFP4_FORMAT
from services.worker.quant.narrow import narrowed_shape
from services.worker.quant.scheme import GROUP as PER_GROUP
from services.worker.quant.scheme import Numbers, Scheme

MXFP4 = Scheme("stack", Numbers("fp4", PER_GROUP, GROUP, powers=True))


@dataclass(frozen=True, slots=True)
class StackPart:
    """Outputs `begin`, `begin + step`, ... of expert `index`. A StoredTensor [out, in], or [out] of biases."""

    name: str
    shape: tuple[int, ...]
    stack: StackedTensor
    index: int
    begin: int
    step: int

    @property
    def storage(self) -> str:
        return self.stack.storage

    @property
    def source(self) -> str:
        return f'{self.stack.source} ("{self.stack.name}")'

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        outputs = self.stack.entry(self.index)[..., self.begin :: self.step]
        return outputs.T.to(dtype).contiguous() if outputs.dim() == 2 else outputs.to(dtype, copy=True)

    def blocks(self) -> torch.Tensor:
        raise ValueError(f'tensor "{self.name}" is a part of a stack')


@dataclass(frozen=True, slots=True)
class StackRows(StackPart):
    """Of a stack whose outputs are its second dimension, as it is stored: a RawTensor [out, bytes].

    `window`: rows and columns of it that are read; (): all.
    """

    window: tuple[slice, ...] = ()

    def raw(self) -> torch.Tensor:
        rows = self.stack.entry(self.index)[self.begin :: self.step].flatten(1)
        return rows[self.window].contiguous()

    def narrow(self, dim: int, begin: int, end: int) -> StoredTensor:
        window = list(self.window or (slice(0, size) for size in self.shape))
        window[dim] = slice(window[dim].start + begin, window[dim].start + end)
        return replace(self, shape=narrowed_shape(self.shape, dim, begin, end), window=tuple(window))

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        raise ValueError(f'tensor "{self.name}" is a piece of a coded matrix')


def unstack(tensors: dict[str, StoredTensor], stack: str, names: Sequence[str]) -> None:
    """Replaces the stack of that name, its scales and its biases, if it is there, by each expert's parts.

    `names`: of the matrices that share it, by turns, ending in ".weight", with "{e}" for the expert's number. Raises
    ConfigError for one that cannot be split so.
    """
    scales = _take(tensors, f"{stack}_scales")
    whole = _take(tensors, f"{stack}_blocks" if scales is not None else stack)
    biases = _take(tensors, f"{stack}_bias")
    for tensor, factors in ((whole, scales), (biases, None)):
        if tensor is None:
            continue
        shape = _shape(tensor, factors, tensor is biases, len(names))
        for e in range(tensor.shape[0]):
            for begin, name in enumerate(names):
                full = name.format(e=e)
                full = full.removesuffix(".weight") + ".bias" if tensor is biases else full
                place = (e, begin, len(names))
                if factors is None:
                    tensors[full] = StackPart(full, shape, tensor, *place)
                    continue
                rows, columns = shape
                pieces = MXFP4_FORMAT.pieces(MXFP4)
                values = StackRows(full, (rows, columns // 2), tensor, *place)
                exponents = StackRows(full, (rows, columns // GROUP), factors, *place)
                read = {VALUES: (pieces[VALUES], values), SCALES: (pieces[SCALES], exponents)}
                tensors[full] = Coded(full, (rows, columns), MXFP4_FORMAT, MXFP4, read)


def _shape(stack: StackedTensor, scales: StackedTensor | None, is_bias: bool, parts: int) -> tuple[int, ...]:
    """Of each part."""
    found = stack.shape
    inputs = found[1:-1]
    fits = len(found) == (2 if is_bias else 3)
    if scales is not None:
        fits = len(found) == 4 and (*found[:3], GROUP // 2) == (*scales.shape, found[3])
        inputs = (found[2] * GROUP,) if fits else ()
    outputs = found[-1] if scales is None else found[1]
    if not fits or outputs % parts:
        raise ConfigError(f'{stack.source}: tensor "{stack.name}" of shape {list(found)} is no stack of experts')
    return (outputs // parts, *inputs)


def _take(tensors: dict[str, StoredTensor], name: str) -> StackedTensor | None:
    tensor = tensors.pop(name, None)
    if tensor is not None and not isinstance(tensor, StackedTensor):
        raise ConfigError(f'{tensor.source}: tensor "{name}" can only be read as a whole, and holds all experts')
    return tensor
