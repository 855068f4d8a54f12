"""The greedy token of each row."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op

CHUNK = 4096


def make_argmax_case(num_rows: int, vocab_size: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(num_rows)
        return (torch.randn(num_rows, vocab_size, generator=generator).round(decimals=1).to(dtype),)

    return Case(f"{num_rows}x{vocab_size}", make)


@op(
    cases=[make_argmax_case(1, 49152), make_argmax_case(5, 131), make_argmax_case(3, 9000), make_argmax_case(0, 256)],
    tolerances={
        dtype: Tolerance(0.0, 0.0, "token ids; the first of equals")
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    },
)
def argmax(logits: Tensor) -> Tensor:
    """The first index of each row's maximum. logits: float32 or the activations' dtype [S, V];
    returns int32 [S]."""
    vocab_size = logits.shape[1]
    whole = vocab_size // CHUNK
    if whole < 2:
        return logits.argmax(-1).to(torch.int32)
    # a maximum is vectorized on a CPU and an argmax is not: first find the chunk; the last ones may overlap
    best = logits[:, : whole * CHUNK].view(-1, whole, CHUNK).amax(-1)
    best = torch.cat((best, logits[:, vocab_size - CHUNK :].amax(-1, keepdim=True)), -1)
    start = (best.argmax(-1, keepdim=True) * CHUNK).clamp_(max=vocab_size - CHUNK)
    inside = logits.gather(1, start + torch.arange(CHUNK, device=logits.device)).argmax(-1, keepdim=True)
    return (start + inside).squeeze(1).to(torch.int32)
