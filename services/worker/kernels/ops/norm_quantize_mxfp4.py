"""RMS normalization and the MXFP4 form of its result: the normed row is never stored."""

import torch
from torch import Tensor

from services.worker.kernels.ops.quantize_mxfp4 import quantize_mxfp4
from services.worker.kernels.ops.rms_norm import normalized
from services.worker.kernels.registry import Case, Tolerance, op

EXACT = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # numbers of E2M1


def make_norm_mxfp4_case(num_tokens: int, width: int) -> Case:
    """Rows of ones with signs: their norm is the weight, whose groups are codes times a power of two. So the last bit
    of a sum, or whether the normed row is rounded to 16 bits before, moves no number to another code or scale.
    """

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        generator = torch.Generator().manual_seed(num_tokens + width)
        signs = torch.randint(0, 2, (num_tokens, width), generator=generator) * 2 - 1
        codes = torch.tensor(EXACT)[torch.randint(0, len(EXACT), (width // 32, 32), generator=generator)]
        codes[:, 0] = 4.0  # the largest of a group is well below 6, and above 3
        powers = torch.exp2(torch.randint(-3, 4, (width // 32, 1), generator=generator).float())
        return signs.to(dtype), (codes * powers).flatten().to(dtype), 1e-6

    return Case(f"{num_tokens}x{width}", make)


@op(
    cases=[  # whole tiles of scales, as of quantize_mxfp4
        make_norm_mxfp4_case(256, 256),
        make_norm_mxfp4_case(512, 768),
        make_norm_mxfp4_case(0, 256),
    ],
    tolerances={
        dtype: Tolerance(0.0, 0.0, "the cases lie off all bounds between codes")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
)
def norm_quantize_mxfp4(x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """quantize_mxfp4(rms_norm(x, norm, eps)). x: [T, N], N a multiple of 32; norm: [N]."""
    packed, scales = quantize_mxfp4.meaning(normalized(x, norm, eps))
    return packed, scales
