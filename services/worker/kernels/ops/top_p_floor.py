"""The lowest logit that top-p keeps, without sorting the vocabulary. Only for rows that have a top_p and no top_k.

A radix selection: exp(logit - max) is in [0, 1], where the bits of a float32 grow with its value. Three passes over
10 bits each add up the mass per bin and keep the bin in which the mass from above reaches the target.
"""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op

BINS = 1024
LIKELY = 256  # tokens


def make_top_p_case(num_rows: int, vocab_size: int, spread: float) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(num_rows)
        logits = torch.randn(num_rows, vocab_size, generator=generator).to(dtype).float() * spread
        temperature = torch.rand(num_rows, generator=generator) + 0.5
        return logits, temperature, torch.rand(num_rows, generator=generator).clamp_(0.01, 0.999)

    return Case(f"{num_rows}x{vocab_size}s{spread}", make)


def _by_radix(logits: Tensor, weight: Tensor, top_p: Tensor) -> Tensor:
    """weight: exp of the scaled logits, at most 1."""
    bits = weight.view(torch.int32)
    live = weight
    border = torch.zeros(len(logits), 1, dtype=torch.int32, device=logits.device)
    short = torch.empty(0)
    for shift in (20, 10, 0):
        bins = (bits >> shift & (BINS - 1)).long()
        mass = torch.zeros(len(logits), BINS, device=logits.device).scatter_add_(1, bins, live)
        above = mass.flip(-1).double().cumsum(-1)  # mass of this bin and all higher ones, highest first
        if shift == 20:
            short = above[:, -1:] * top_p[:, None].double()
        rank = torch.searchsorted(above, short).clamp_(max=BINS - 1)
        # rounding may leave the target just above the bin's whole mass: then its lowest nonempty part is the border
        nonempty = torch.where(mass.flip(-1) > 0, torch.arange(BINS, device=logits.device), 0).amax(-1, keepdim=True)
        rank = torch.minimum(rank, nonempty)
        chosen = BINS - 1 - rank
        short = short - (above.gather(1, rank) - mass.double().gather(1, chosen))
        border = border | (chosen << shift).to(torch.int32)
        live = live.masked_fill(bins != chosen, 0.0)
    return logits.masked_fill(bits < border, torch.inf).amin(-1)


@op(
    cases=[make_top_p_case(1, 49152, 3.0), make_top_p_case(8, 1000, 0.01), make_top_p_case(5, 33, 20.0)],
    tolerances={torch.float32: Tolerance(0.0, 0.0, "one of the logits; sums may differ at a border of top_p")},
)
def top_p_floor(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit kept: the fewest tokens whose softmax(logits / temperature) mass reaches top_p, at least one.

    logits: float32 [S, V]; temperature, top_p: float32 [S], 0 < top_p <= 1. Returns float32 [S]; ties are kept.
    """
    top = logits.amax(-1, keepdim=True)
    weight = ((logits - top) / temperature[:, None]).exp_()
    if logits.device.type != "cpu" or logits.shape[1] <= LIKELY:
        return _by_radix(logits, weight, top_p)
    # Most distributions need few tokens, and a CPU may look: a quarter of the time. Elsewhere looking is waiting.
    best = logits.topk(LIKELY, -1).values
    mass = ((best - top) / temperature[:, None]).exp_().double().cumsum(-1)
    target = weight.sum(-1, keepdim=True).double() * top_p[:, None]
    floor = best.gather(1, torch.searchsorted(mass, target).clamp_(max=LIKELY - 1)).squeeze(1)
    if len(rest := (mass[:, -1:] < target).squeeze(1).nonzero().squeeze(1)):
        floor[rest] = _by_radix(logits[rest], weight[rest], top_p[rest])
    return floor
