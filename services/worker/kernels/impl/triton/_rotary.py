"""Parts of the kernels that rotate heads: halves of a head, the rotation of them, and how 8-bit caches round."""

import torch
import triton
import triton.language as tl


@triton.jit
def rotate(low, high, cos_ptr, sin_ptr, offsets, mask, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token's cos and sin, [2 * HALF] each, on the halves of its heads, [heads, padded half], in float32."""
    cos_low = tl.load(cos_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
    turned = low * cos_low[None, :] + high * sin_low[None, :]
    return turned, high * cos_high[None, :] + low * sin_high[None, :]


@triton.jit
def quantize(x, scale_ptr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """x / scale within the range of the cache's 8-bit floats; LIMIT 0: x itself."""
    if LIMIT > 0:
        # rounded as torch does, so that equal inputs give equal caches
        return tl.clamp(tl.div_rn(x.to(tl.float32), tl.load(scale_ptr).to(tl.float32)), -LIMIT, LIMIT)
    else:
        return x


def limit_of(cache: torch.Tensor) -> float:
    """The largest number of an 8-bit cache, for `quantize`; 0 for wider ones."""
    return torch.finfo(cache.dtype).max if cache.element_size() == 1 else 0.0
