"""The greedy token of each row."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op

CHUNK = 128


def make_argmax_case(num_rows: int, vocab_size: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(num_rows)
        return (torch.randn(num_rows, vocab_size, generator=generator).to(dtype).float().round(decimals=1),)

    return Case(f"{num_rows}x{vocab_size}", make)


@op(
    cases=[make_argmax_case(1, 49152), make_argmax_case(5, 131), make_argmax_case(3, 1280), make_argmax_case(0, 256)],
    tolerances={torch.float32: Tolerance(0.0, 0.0, "token ids; the first of equals")},
)
def argmax(logits: Tensor) -> Tensor:
    """The first index of each row's maximum. logits: float32 [S, V]; returns int32 [S]."""
    num_rows, vocab_size = logits.shape
    if vocab_size % CHUNK or not logits.is_contiguous():
        return logits.argmax(-1).to(torch.int32)
    # a maximum is vectorized on a CPU and an argmax is not: first find the chunk
    chunks = logits.view(num_rows, vocab_size // CHUNK, CHUNK)
    chunk = chunks.amax(-1).argmax(-1, keepdim=True)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, -1, CHUNK)).argmax(-1)
    return (chunk * CHUNK + inside).squeeze(1).to(torch.int32)
