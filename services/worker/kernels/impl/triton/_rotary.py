"""Parts of the kernels that rotate heads: halves of a head, the rotation of them, and how 8-bit caches round."""

import torch
import triton
import triton.language as tl


@triton.jit
def load_angles(cos_ptr, sin_ptr, offsets, mask, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token's cos and sin, [2 * HALF] each, in halves [padded half]: cos low and high, sin low and high."""
    cos_low = tl.load(cos_ptr + offsets, mask=mask, other=0.0)
    cos_high = tl.load(cos_ptr + HALF + offsets, mask=mask, other=0.0)
    sin_low = tl.load(sin_ptr + offsets, mask=mask, other=0.0)
    sin_high = tl.load(sin_ptr + HALF + offsets, mask=mask, other=0.0)
    return cos_low, cos_high, sin_low, sin_high


@triton.jit
def rotate(low, high, cos_low, cos_high, sin_low, sin_high):  # type: ignore[no-untyped-def]
    """The halves of one token's heads, float32 [heads, padded half], turned by its angles."""
    turned = low * cos_low.to(tl.float32)[None, :] + high * sin_low.to(tl.float32)[None, :]
    return turned, high * cos_high.to(tl.float32)[None, :] + low * sin_high.to(tl.float32)[None, :]


@triton.jit
def load_turned(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, rows, mask, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Halves [rows, padded half] of `rows` (offsets from x_ptr) with 2 * HALF numbers each, turned."""
    offsets = tl.arange(0, HALF_PADDED)
    inside = offsets < HALF
    mask = mask & inside[None, :]
    if INTERLEAVED:
        low = tl.load(x_ptr + rows + 2 * offsets[None, :], mask=mask, other=0.0)
        high = tl.load(x_ptr + rows + 2 * offsets[None, :] + 1, mask=mask, other=0.0)
    else:
        low = tl.load(x_ptr + rows + offsets[None, :], mask=mask, other=0.0)
        high = tl.load(x_ptr + rows + HALF + offsets[None, :], mask=mask, other=0.0)
    cos_low, cos_high, sin_low, sin_high = load_angles(cos_ptr, sin_ptr, offsets, inside, HALF)
    return rotate(low.to(tl.float32), high.to(tl.float32), cos_low, cos_high, sin_low, sin_high)


@triton.jit
def stored(x, cache_ptr, scale_ptr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """As the cache holds x. LIMIT: the largest of its 8-bit floats, which hold x / scale; 0: it has wider ones."""
    if LIMIT > 0:
        return scaled(x, cache_ptr, tl.load(scale_ptr).to(tl.float32), LIMIT)
    else:
        return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def held(x, cache_ptr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `stored`, without a scale."""
    if LIMIT > 0:
        return tl.clamp(x.to(tl.float32), -LIMIT, LIMIT).to(cache_ptr.dtype.element_ty)
    else:
        return x.to(cache_ptr.dtype.element_ty)


@triton.jit
def own_scale(largest, scale_ptr, mask, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the scale of each head of a token, and gives it. largest, scale_ptr, mask: [heads]."""
    scale = tl.div_rn(tl.maximum(largest, 1e-10), tl.full(largest.shape, LIMIT, tl.float32))
    tl.store(scale_ptr, scale, mask=mask)
    return scale[:, None]


@triton.jit
def scaled(x, cache_ptr, scale, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """As an 8-bit cache holds x / scale, fp32; rounded as torch does, so that equal inputs give equal caches."""
    return tl.clamp(tl.div_rn(x.to(tl.float32), scale), -LIMIT, LIMIT).to(cache_ptr.dtype.element_ty)


def limit_of(cache: torch.Tensor) -> float:
    """The largest number of an 8-bit cache, for `stored`; 0 for wider ones."""
    return torch.finfo(cache.dtype).max if cache.element_size() == 1 else 0.0
