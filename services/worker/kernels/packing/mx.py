"""Microscaling (OCP MX 1.0): one power of two (e8m0) per 32 numbers of e2m1, two to a byte (FP4), or of e4m3 (FP8).

`tile_scales` is the order in which gfx950's matrix cores read scales: tiles of 32 rows by 8 scales, padded to whole
groups of 256 rows. Callers: the meanings of ops, weight formats at load.
"""

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32  # numbers that share a scale
LARGEST = 6.0  # of e2m1
BIAS = 127  # of e8m0
SMALLEST_BITS = 0x400000  # of 2 ** -127, which is subnormal in float32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
PADDED_ROWS, PADDED_COLUMNS = 256, 8


def grouped(values: Tensor, group: int) -> Tensor:
    """[..., N] as [..., N / group, group]."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // group, group)


def decode_scales(scales: Tensor) -> Tensor:
    """uint8 exponents, any shape, as float32 powers of two (255, MX's NaN, becomes infinity)."""
    bits = scales.to(torch.int32) << 23
    return torch.where(scales == 0, SMALLEST_BITS, bits).view(torch.float32)


def decode_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """packed: uint8 [..., N / 2], the lower half byte first; scales: uint8 [..., N / 32]. Returns float32 [..., N]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    table = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.float32, device=packed.device)
    groups = grouped(table[codes.long()], GROUP) * decode_scales(scales)[..., None]
    return groups.flatten(-2)


def encode_mxfp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """[..., N], N a multiple of 32, as uint8 [..., N / 2] and scales uint8 [..., N / 32].

    A group's scale is the least power of two under which nothing exceeds 6; numbers round to nearest, ties to even.
    """
    groups = grouped(values.float(), GROUP)
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) / LARGEST)
    rounded_up = torch.where(mantissa > 0.5, exponent, exponent - 1)
    scales = (rounded_up + BIAS).clamp_(0, 254).to(torch.uint8)
    scaled = (groups / decode_scales(scales)[..., None]).flatten(-2)
    size = scaled.abs()
    # VALUES lie 0.5 apart up to 2, 1 up to 4, then 2: the least of three roundings, each of ties to even, is the code.
    # In place: what a load spends on this is memory.
    nearest = (size * 2).round_()
    torch.minimum(nearest, size.round().add_(2), out=nearest)
    torch.minimum(nearest, size.mul_(0.5).round_().add_(4), out=nearest)
    codes = nearest.to(torch.uint8)
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    return codes[..., ::2] | codes[..., 1::2] << 4, scales


def encode_mxfp8(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., N], N a multiple of 32, as `dtype` (an fp8 of 4 exponent bits) [..., N] and scales uint8 [..., N / 32].

    A group's scale is the least power of two under which nothing exceeds the dtype's largest number.
    """
    groups = grouped(values.float(), GROUP)
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) / torch.finfo(dtype).max)
    rounded_up = torch.where(mantissa > 0.5, exponent, exponent - 1)
    scales = (rounded_up + BIAS).clamp_(0, 254).to(torch.uint8)
    return (groups / decode_scales(scales)[..., None]).flatten(-2).to(dtype), scales


def decode_mxfp8(numbers: Tensor, scales: Tensor) -> Tensor:
    """numbers: fp8 [..., N]; scales: uint8 [..., N / 32]. Returns float32 [..., N]."""
    return (grouped(numbers.float(), GROUP) * decode_scales(scales)[..., None]).flatten(-2)


def tile_scales(scales: Tensor) -> Tensor:
    """uint8 [M, G] as tiles [M' / 32, G' / 8, 4, 16, 2, 2], M' and G' padded to multiples of 256 and 8; a new tensor.

    Within a tile: scale modulo 4, row modulo 16, upper or lower four scales, upper or lower 16 rows. Padding is 0.
    """
    rows, columns = scales.shape
    padded = functional.pad(scales, (0, -columns % PADDED_COLUMNS, 0, -rows % PADDED_ROWS))
    split = padded.reshape(padded.shape[0] // 32, 2, 16, padded.shape[1] // 8, 2, 4)
    return split.permute(0, 3, 5, 2, 4, 1).contiguous()


def untile_scales(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """The [rows, columns] that `tile_scales` was given; a new contiguous tensor."""
    whole = tiles.permute(0, 5, 3, 1, 4, 2).reshape(tiles.shape[0] * 32, tiles.shape[1] * 8)
    return whole[:rows, :columns].contiguous()
