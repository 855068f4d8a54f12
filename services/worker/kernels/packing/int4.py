"""Numbers of four bits without a sign, two to a byte, the lower half byte first: what the int4 ops read."""

import torch
from torch import Tensor

MIDDLE = 8  # what stands for 0 where a weight has no zero points


def pack_int4(numbers: Tensor) -> Tensor:
    """[..., K] of 0 .. 15, any integer dtype, K even, as uint8 [..., K / 2]."""
    narrow = numbers.to(torch.uint8)
    return narrow[..., ::2] | narrow[..., 1::2] << 4


def unpack_int4(packed: Tensor) -> Tensor:
    """The way back: uint8 [..., 2 * K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_int4(packed: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """(number - zero) * scale, float32 [..., N, K]. packed: uint8 [..., N, K / 2]; scales: float [..., N, K / group].

    zeros: as scales, of any dtype; None: MIDDLE.
    """
    numbers = unpack_int4(packed).float()
    groups = numbers.view(*scales.shape, -1)
    offsets = MIDDLE if zeros is None else zeros.float()[..., None]
    return ((groups - offsets) * scales.float()[..., None]).flatten(-2)
