"""The lowest logit that a row's top-k, top-p and min-p together keep, for a whole step's rows in one call."""

from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.kernels.ops.top_k_floor import top_k_floor
from services.worker.kernels.ops.top_p_floor import top_p_floor
from services.worker.kernels.registry import Case, Tolerance, op

WHY = "one of the logits, or by the logarithm of min_p; sums may differ at a border of top_p"


def make_floor_case(num_rows: int, vocab_size: int, max_k: int) -> Case:
    """Rows of every kind: greedy, with one limit, with several, with none."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        generator = torch.Generator().manual_seed(num_rows)
        logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)
        kind = torch.arange(num_rows)
        temperature = (torch.rand(num_rows, generator=generator) + 0.5).masked_fill_(kind % 7 == 5, 0.0)
        top_k = torch.randint(1, max_k + 1, (num_rows,), generator=generator).masked_fill_(kind % 3 == 1, 0)
        top_p = torch.rand(num_rows, generator=generator).clamp_(0.05).masked_fill_(kind % 4 == 3, 1.0)
        min_p = (torch.rand(num_rows, generator=generator) * 0.2).masked_fill_(kind % 2 == 0, 0.0)
        return logits, temperature, top_k, top_p, min_p, int(top_k.max()) if num_rows else 0

    return Case(f"{num_rows}x{vocab_size}k{max_k}", make)


@op(
    cases=[
        make_floor_case(1, 9000, 50),
        make_floor_case(8, 300, 7),
        make_floor_case(2, 2100, 1500),
        make_floor_case(0, 9, 2),
    ],
    tolerances={
        torch.float32: Tolerance(1e-6, 1e-6, WHY),
        torch.float16: Tolerance(1e-6, 1e-6, WHY),
        torch.bfloat16: Tolerance(1e-6, 1e-6, WHY),
    },
)
def keep_floor(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, max_k: int) -> Tensor:
    """The highest of: the floor of top_p within top_k, and maximum + temperature * log(min_p). -inf: all are kept.

    logits: float32 or the activations' dtype [S, V]; temperature: float32 [S], 0 for greedy rows, which get -inf;
    top_k: int64 [S], 0 for none, else 1 .. max_k; top_p: float32 [S], 1 for none; min_p: float32 [S], 0 for none;
    max_k <= V, 0 if no row has a top_k. Returns float32 [S]; ties are kept.
    """
    floor = torch.full((len(logits),), -torch.inf, device=logits.device)
    drawing = temperature > 0
    temperature = torch.where(drawing, temperature, 1.0)

    def raise_to(mask: Tensor, find: Callable[[Tensor], Tensor]) -> None:
        # only a CPU may look which rows they are; elsewhere looking is waiting
        rows = mask.nonzero().squeeze(1) if mask.device.type == "cpu" else torch.arange(len(mask), device=mask.device)
        if len(rows):
            floor[rows] = torch.where(mask[rows], torch.maximum(floor[rows], find(rows)), floor[rows])

    raise_to(drawing & (min_p > 0), lambda rows: logits[rows].amax(-1).float() + temperature[rows] * min_p[rows].log())
    if max_k:
        raise_to(
            drawing & (top_k > 0),
            lambda rows: top_k_floor.meaning(
                logits[rows].float(), temperature[rows], top_k[rows].clamp(min=1), top_p[rows], max_k
            ),
        )
    raise_to(
        drawing & (top_k == 0) & (top_p < 1),
        lambda rows: top_p_floor.meaning(logits[rows].float(), temperature[rows], top_p[rows]),
    )
    return floor
