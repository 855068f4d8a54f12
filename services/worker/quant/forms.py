"""How activations enter a product of coded weights: as they are, or in 8 or 4 bits with scales; norms fused where a
provider has that. Each form is a callable: x to what the op takes in x's place. Used by the formats of this folder.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.add_narrow_linear import add_narrow_linear
from services.worker.kernels.ops.gelu_and_mul import gelu_and_mul
from services.worker.kernels.ops.norm_gated_narrow_linear import norm_gated_narrow_linear
from services.worker.kernels.ops.norm_narrow_linear import norm_narrow_linear
from services.worker.kernels.ops.norm_quantize_groups import norm_quantize_groups
from services.worker.kernels.ops.norm_quantize_mxfp4 import norm_quantize_mxfp4
from services.worker.kernels.ops.norm_quantize_rows import norm_quantize_rows
from services.worker.kernels.ops.quantize_groups import quantize_groups
from services.worker.kernels.ops.quantize_mxfp4 import quantize_mxfp4
from services.worker.kernels.ops.quantize_mxfp8 import quantize_mxfp8
from services.worker.kernels.ops.quantize_rows import quantize_rows, stored
from services.worker.kernels.ops.quantize_tensor import quantize_tensor
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.ops.silu_quantize_groups import silu_quantize_groups
from services.worker.kernels.registry import Bindings
from services.worker.quant.coded import Making, reordered
from services.worker.quant.contract import FusedProducts, Norm

BLOCK = 128
Entered = tuple[Tensor, ...]
NARROW_OPS = ("norm_narrow_linear", "norm_gated_narrow_linear", "add_narrow_linear")


class Form(Protocol):
    """`norms`, `gates`: whether `normed` and `gated` are one kernel each."""

    @property
    def norms(self) -> bool: ...

    @property
    def gates(self) -> bool: ...

    @property
    def order(self) -> Tensor | None:
        """Of x's columns, where it is another one."""
        ...

    def __call__(self, x: Tensor) -> Entered: ...

    def normed(self, x: Tensor, norm: Norm) -> Entered: ...

    def gated(self, halves: Tensor) -> Entered:
        """Of silu_and_mul(halves)."""
        ...


class Unfused:
    norms = gates = False
    order: Tensor | None = None

    def normed(self, x: Tensor, norm: Norm) -> Entered:
        raise NotImplementedError

    def gated(self, halves: Tensor) -> Entered:
        raise NotImplementedError


class Plain(Unfused):
    """`order`: of x's columns; one behind the last is 0."""

    def __init__(self, order: Tensor | None = None, columns: int = 0) -> None:
        self.order = order
        self._pads = order is not None and bool((order == columns).any())

    def __call__(self, x: Tensor) -> Entered:
        if self.order is None:
            return (x,)
        return ((functional.pad(x, (0, 1)) if self._pads else x).index_select(1, self.order),)


class ByRow(Unfused):
    """A scale per token."""

    def __init__(self, dtype: torch.dtype, bindings: Bindings) -> None:
        self.dtype = dtype
        self.norms = bindings.provider(norm_quantize_rows) != "torch"
        self._quantize = bindings(quantize_rows)
        self._norm = bindings(norm_quantize_rows) if self.norms else None

    def __call__(self, x: Tensor) -> Entered:
        return self._quantize(x, self.dtype)

    def normed(self, x: Tensor, norm: Norm) -> Entered:
        assert self._norm is not None
        return self._norm(x, norm.weight, norm.eps, self.dtype)


class ByGroup(Unfused):
    """A scale per token and 128 columns, `by_column` as tiled weights want them."""

    def __init__(self, dtype: torch.dtype, by_column: bool, bindings: Bindings) -> None:
        self.dtype, self.by_column = dtype, by_column
        self.norms = bindings.provider(norm_quantize_groups) != "torch"
        self.gates = bindings.provider(silu_quantize_groups) != "torch"
        self._quantize = bindings(quantize_groups)
        self._norm = bindings(norm_quantize_groups) if self.norms else None
        self._gate = bindings(silu_quantize_groups) if self.gates else None

    def __call__(self, x: Tensor) -> Entered:
        return self._quantize(x, self.dtype, BLOCK, self.by_column)

    def normed(self, x: Tensor, norm: Norm) -> Entered:
        assert self._norm is not None
        return self._norm(x, norm.weight, norm.eps, self.dtype, BLOCK, self.by_column)

    def gated(self, halves: Tensor) -> Entered:
        assert self._gate is not None
        return self._gate(halves, self.dtype, BLOCK, self.by_column)


class ByTensor(Unfused):
    """One scale for the step, from its numbers or the checkpoint's `scale`, float32 [1]; `each`: repeated per token."""

    def __init__(self, dtype: torch.dtype, scale: Tensor | None, each: bool, bindings: Bindings) -> None:
        self.dtype, self.scale, self.each = dtype, scale, each
        self._quantize = bindings(quantize_tensor) if scale is None else None

    def __call__(self, x: Tensor) -> Entered:
        if not len(x):
            return x.to(self.dtype), x.new_ones(0 if self.each else 1, dtype=torch.float32).view(-1, *[1] * self.each)
        if self._quantize is not None:
            numbers, scale = self._quantize(x, self.dtype)
        else:
            assert self.scale is not None
            numbers, scale = stored(x.float() / self.scale, self.dtype), self.scale
        return numbers, scale.expand(len(x), 1).contiguous() if self.each else scale


class Mxfp8(Unfused):
    def __init__(self, dtype: torch.dtype, bindings: Bindings) -> None:
        self.dtype, self._quantize = dtype, bindings(quantize_mxfp8)

    def __call__(self, x: Tensor) -> Entered:
        return self._quantize(x, self.dtype)


class Mxfp4(Unfused):
    def __init__(self, bindings: Bindings) -> None:
        self.norms = bindings.provider(norm_quantize_mxfp4) != "torch"
        self._quantize = bindings(quantize_mxfp4)
        self._norm = bindings(norm_quantize_mxfp4) if self.norms else None

    def __call__(self, x: Tensor) -> Entered:
        return self._quantize(x)

    def normed(self, x: Tensor, norm: Norm) -> Entered:
        assert self._norm is not None
        return self._norm(x, norm.weight, norm.eps)


Stored = tuple[Tensor, Tensor, Tensor | None]  # weight, scales and zero points, as norm_narrow_linear takes them


class Product(Protocol):
    """One matrix in the layout of its op. `stored`: where ops that fuse products of few bits can read it."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def stored(self) -> Stored | None: ...

    def __call__(self, entered: Entered, bias: Tensor | None, dtype: torch.dtype) -> Tensor: ...

    def dequantize(self) -> Tensor:
        """float32 [out, in], columns as they are stored."""
        ...


class NarrowProducts:
    """A FusedProducts of ops that take norm, gate and residual into the product, and decide by the number of rows
    whether activations are rounded."""

    def __init__(self, stored: Stored, bindings: Bindings) -> None:
        self._stored = stored
        self._norm, self._gated = bindings(norm_narrow_linear), bindings(norm_gated_narrow_linear)
        self._add = bindings(add_narrow_linear)

    def after_norm(self, x: Tensor, norm: Norm, bias: Tensor | None) -> Tensor:
        return self._norm(x, norm.weight, norm.eps, *self._stored, bias)

    def gated(self, x: Tensor, norm: Norm, bias: Tensor | None, activation: str) -> Tensor:
        return self._gated(x, norm.weight, norm.eps, *self._stored, bias, activation)

    def add_to(self, residual: Tensor, x: Tensor, bias: Tensor | None) -> None:
        self._add(residual, x, *self._stored, bias)


class WidenedProduct:
    """Of a weight that is widened on its way to the matrix cores: activations enter as they are.

    `linear` takes x, `parts` and a bias, `decode` the parts: values, scales, and zero points where the op has them.
    """

    def __init__(
        self, parts: tuple[Tensor | None, ...], linear: Callable[..., Tensor], decode: Callable[..., Tensor]
    ) -> None:
        self._parts, self._linear, self._decode = parts, linear, decode
        self.num_bytes = sum(part.nbytes for part in parts if part is not None)

    @property
    def stored(self) -> Stored | None:
        values, scales, *zeros = self._parts
        assert values is not None and scales is not None
        return values, scales, zeros[0] if zeros else None

    def __call__(self, entered: Entered, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        (x,) = entered
        return self._linear(x, *self._parts, bias)

    def dequantize(self) -> Tensor:
        return self._decode(*self._parts)


class CodedWeight:
    """A Weight: `form` of the activations, then `product`. `fused` where the form is fused with the norm, or all is."""

    def __init__(self, name: str, shape: tuple[int, int], form: Form, product: Product, making: Making) -> None:
        self.format_name = name
        self.out_features, self.in_features = shape
        self.num_bytes = product.num_bytes
        self.form, self._product, self._activation = form, product, making.activation
        self._gates = {"silu": making.bindings(silu_and_mul), "gelu_tanh": making.bindings(gelu_and_mul)}
        self.fused: FusedProducts | None = self if form.norms else None
        whole = product.stored if form.order is None else None
        if whole is not None and making.bindings.provider(norm_narrow_linear) != "torch":
            self.fused = NarrowProducts(whole, making.bindings)

    @property
    def takes_gate(self) -> bool:
        return self.form.gates and not isinstance(self.fused, NarrowProducts)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._product(self.form(x), bias, x.dtype)

    def after_norm(self, x: Tensor, norm: Norm, bias: Tensor | None) -> Tensor:
        return self._product(self.form.normed(x, norm), bias, x.dtype)

    def gated(self, x: Tensor, norm: Norm, bias: Tensor | None, activation: str) -> Tensor:
        return self._gates[activation](self.after_norm(x, norm, bias))

    def add_to(self, residual: Tensor, x: Tensor, bias: Tensor | None) -> None:
        residual.add_(self.linear(x, bias))

    def after_gate(self, halves: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(self.form.gated(halves), bias, halves.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.dequantize()).to(self._activation)

    def dequantize(self) -> Tensor:
        wide = self._product.dequantize()
        return wide if self.form.order is None else reordered(wide, self.form.order, self.in_features)
