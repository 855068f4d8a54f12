"""What rows under a grammar may not draw becomes impossible: logits to -inf by a bit mask, in place."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op


def make_mask_case(num_rows: int, vocab_size: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(num_rows + vocab_size)
        logits = torch.randn(num_rows, vocab_size, generator=generator).to(dtype)
        words = (num_rows, -(-vocab_size // 32))
        mask = torch.randint(-(2**31), 2**31, words, generator=generator).to(torch.int32)
        mask[::3] = -1
        mask[:, 0] = 1 << 5
        return logits, mask

    return Case(f"{num_rows}x{vocab_size}", make)


EXACT = Tolerance(0.0, 0.0, "values stay or are -inf")


@op(
    cases=[make_mask_case(1, 49152), make_mask_case(5, 77), make_mask_case(4, 4100)],
    tolerances={torch.float32: EXACT, torch.float16: EXACT, torch.bfloat16: EXACT},
    writes=("logits",),
)
def mask_logits(logits: Tensor, mask: Tensor) -> None:
    """logits[s, t] = -inf where bit t % 32 of mask[s, t // 32] is 0.

    logits: float32 or the activations' dtype [S, V], changed; mask: int32 [S, ceil(V / 32)].
    """
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = (mask[:, :, None] >> bits) & 1
    logits.masked_fill_(allowed.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
