"""The next token of each row of a plain step: greedy where the temperature is 0, else a draw from the whole softmax.

This op is part of the captured decode step, so it takes logits as the head leaves them and one temperature per row.
"""

import torch
from torch import Tensor

from services.worker.kernels.ops.sample import sample
from services.worker.kernels.registry import Case, Tolerance, op

WHY = "token ids; the first of equals; sums may differ at a border"


def make_draw_case(num_rows: int, vocab_size: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(num_rows)
        logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)
        temperature = torch.rand(num_rows, generator=generator) + 0.1
        temperature[::3] = 0.0
        seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
        return logits, temperature, seeds, torch.arange(num_rows)

    return Case(f"{num_rows}x{vocab_size}", make)


@op(
    cases=[make_draw_case(2, 49152), make_draw_case(7, 1000), make_draw_case(5, 5003), make_draw_case(0, 256)],
    tolerances={
        torch.float32: Tolerance(0.0, 0.0, WHY),
        torch.float16: Tolerance(0.0, 0.0, WHY),
        torch.bfloat16: Tolerance(0.0, 0.0, WHY),
    },
)
def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """`sample` without a floor: greedy (the first of equals) where temperature is 0.

    logits: float32 or the activations' dtype [S, V]; temperature: float32 [S], >= 0; seeds: int64 [S] (bits of the
    uint64); positions: int64 [S], the output index. Returns int32 [S], always below V.
    """
    floor = torch.full((len(logits),), -torch.inf, device=logits.device)
    return sample.meaning(logits, temperature, floor, seeds, positions)
