"""The lowest logit that top-k, and top-p within it, keep. Only for rows that have a top_k."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op


def make_top_k_case(num_rows: int, vocab_size: int, max_k: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        generator = torch.Generator().manual_seed(num_rows)
        logits = torch.randn(num_rows, vocab_size, generator=generator).to(dtype).float() * 3
        temperature = torch.rand(num_rows, generator=generator) + 0.5
        top_k = torch.randint(1, max_k + 1, (num_rows,), generator=generator)
        top_p = torch.rand(num_rows, generator=generator).clamp_(0.05)
        top_p[::3] = 1.0
        return logits, temperature, top_k, top_p, max_k

    return Case(f"{num_rows}x{vocab_size}k{max_k}", make)


@op(
    cases=[
        make_top_k_case(1, 49152, 50),
        make_top_k_case(9, 1000, 7),
        make_top_k_case(3, 40, 40),
        make_top_k_case(0, 9, 2),
    ],
    tolerances={torch.float32: Tolerance(0.0, 0.0, "one of the logits; sums may differ at a border of top_p")},
)
def top_k_floor(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, max_k: int) -> Tensor:
    """The smallest logit kept: of the top_k, the fewest whose softmax(logits / temperature) mass reaches top_p.

    logits: float32 [S, V]; temperature, top_p: float32 [S]; top_k: int64 [S], 1 .. max_k; max_k <= V. Returns float32
    [S]; a tie with the floor is kept.
    """
    best = logits.topk(max_k, -1).values
    weight = ((best - best[:, :1]) / temperature[:, None]).exp_()
    rank = torch.arange(max_k, device=logits.device)
    weight = weight.masked_fill_(rank >= top_k[:, None], 0.0)
    mass = weight.cumsum(-1)
    # a token is needed while the mass before it is short of the target; rounding may not end that where none is set
    needed = ((mass - weight < top_p[:, None] * mass[:, -1:]) | (top_p[:, None] >= 1)) & (rank < top_k[:, None])
    return best.gather(1, needed.sum(-1, keepdim=True).sub_(1).clamp_(min=0)).squeeze(1)
