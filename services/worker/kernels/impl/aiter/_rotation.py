"""AITER's rotation, and a step's angles in the forms that AITER wants, made once per step and used by all layers."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter import _triton
from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.impl.aiter._kept import Kept

ROTATE = Function(
    "aiter:rope_cached_fwd",
    needs=("input", "cos", "sin", "rotate_style", "reuse_freqs_front_part", "nope_first"),
    twin=_triton.ROTATE,
)
ROTATE_BOTH = Function(
    "aiter:rope_cached_2c_fwd",
    needs=("input_x", "input_y", "cos", "sin", "rotate_style", "reuse_freqs_front_part", "nope_first"),
    twin=_triton.ROTATE_BOTH,
)
# Element i pairs with i + R / 2; only these halves' angles are given; what is not turned comes last.
STYLE = {"rotate_style": 0, "reuse_freqs_front_part": True, "nope_first": False}


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As the op `rope`. x: [T, H, D]; at least one token; returns a new tensor."""
    cosines, sines = HALVES(cos, sin)
    # AITER's order is sequence, batch, head, dimension
    turned: Tensor = ROTATE(input=x.unsqueeze(1), cos=cosines, sin=sines, **STYLE)
    return turned.squeeze(1)


def both_rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotated` of queries [T, H, D] and keys [T, K, D] in one kernel."""
    cosines, sines = HALVES(cos, sin)
    q, k = ROTATE_BOTH(input_x=q.unsqueeze(1), input_y=k.unsqueeze(1), cos=cosines, sin=sines, **STYLE)
    return q.squeeze(1), k.squeeze(1)


def packed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines then sines of each token's R / 2 angles [T, R], and every token's row of that, int64 [T]."""
    return torch.cat((_half(cos)[:, 0], _half(sin)[:, 0]), -1), torch.arange(len(cos), device=cos.device)


def halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the R / 2 angles, each [T, 1, 1, R / 2], contiguous."""
    cosines, sines = torch.stack((_half(cos), _half(sin))).unsqueeze(2).unbind(0)
    return cosines, sines


def _half(x: Tensor) -> Tensor:
    """The second half: there the sines are not negated."""
    return x[..., x.shape[-1] // 2 :]


PACKED, HALVES = Kept(packed), Kept(halves)
