"""RMS normalization and MXFP4 numbers in one kernel of AITER, which rounds scales up, into tiles, as its quantizer."""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._mxfp4 import E8M0, FP4X2, as_tiles, refuses_mxfp4
from services.worker.kernels.impl.aiter._norm import refuses_norm
from services.worker.kernels.impl.aiter.norm_quantize_groups import NORM
from services.worker.kernels.ops.norm_quantize_mxfp4 import norm_quantize_mxfp4
from services.worker.kernels.packing.mx import GROUP, PADDED_COLUMNS, PADDED_ROWS
from services.worker.kernels.registry import Facts, Impl


def normed_and_quantized(x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    num_tokens, width = x.shape
    packed = torch.empty((num_tokens, width // 2), dtype=torch.uint8, device=x.device)
    rows, columns = num_tokens + -num_tokens % PADDED_ROWS, width // GROUP + -(width // GROUP) % PADDED_COLUMNS
    scales = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    if num_tokens:
        NORM(
            out=packed.view(FP4X2),
            input=x.contiguous(),
            yscale=scales.view(E8M0),
            weight=norm,
            epsilon=eps,
            group_size=GROUP,
            shuffle_scale=True,
        )
    return packed, as_tiles(scales)


def refuses(facts: Facts) -> str | None:
    return refuses_mxfp4(facts, NORM) or refuses_norm(facts, NORM)


IMPL = Impl(norm_quantize_mxfp4, "aiter", normed_and_quantized, refuses)
