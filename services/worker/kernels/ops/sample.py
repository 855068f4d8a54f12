"""One token per row by one random number per row, counter-based: no state, no order, no host synchronisation.

The number depends on (seed, position) only and the sums on the row's own logits only, so a request draws the same
tokens alone, in any batch, and after a replay. Tokens below a row's `floor` have no probability.
"""

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.kernels.ops.argmax import argmax
from services.worker.kernels.registry import Case, Tolerance, op

CHUNK = 1024


def make_sample_case(num_rows: int, vocab_size: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(num_rows)
        logits = torch.randn(num_rows, vocab_size, generator=generator).to(dtype).float() * 3
        temperature = torch.rand(num_rows, generator=generator) + 0.1
        temperature[3::4] = 0.0
        floor = torch.where(torch.arange(num_rows) % 2 == 0, -torch.inf, 1.0)
        seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
        return logits, temperature, floor, seeds, torch.arange(num_rows)

    return Case(f"{num_rows}x{vocab_size}", make)


def _mix(state: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014) on int64, whose products wrap."""
    state = (state ^ (state >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    state = (state ^ (state >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return state ^ (state >> 31 & 0x1FFFFFFFF)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 1) per (seed, position). seeds, positions: int64 [S]; returns float64 [S]."""
    golden = -0x61C8864680B583EB
    mixed = _mix(_mix(seeds + golden) + (positions + 1) * golden)
    return (mixed >> 12 & 0xFFFFFFFFFFFFF).to(torch.float64) * 2.0**-52


def _draw(logits: Tensor, temperature: Tensor, floor: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """As `sample`, for float32 logits and temperatures above 0."""
    num_rows, vocab_size = logits.shape
    top = logits.amax(-1, keepdim=True)
    weight = ((logits - top) / temperature[:, None]).exp_().masked_fill_(logits < floor[:, None], 0.0)
    if vocab_size % CHUNK:
        weight = functional.pad(weight, (0, CHUNK - vocab_size % CHUNK))
    chunks = weight.view(num_rows, weight.shape[1] // CHUNK, CHUNK)
    sums = chunks.sum(-1).double()
    cumulated = sums.cumsum(-1)
    target = uniform(seeds, positions)[:, None] * cumulated[:, -1:]
    chunk = torch.searchsorted(cumulated, target, right=True).clamp_(max=chunks.shape[1] - 1)
    before = cumulated.gather(1, chunk) - sums.gather(1, chunk)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, -1, CHUNK)).squeeze(1)
    place = torch.searchsorted(inside.double().cumsum(-1), target - before, right=True)
    # rounding may put the target behind the chunk's last possible token
    last = torch.where(inside > 0, torch.arange(CHUNK, device=logits.device), 0).amax(-1, keepdim=True)
    return (chunk * CHUNK + torch.minimum(place, last)).squeeze(1).to(torch.int32)


@op(
    cases=[
        make_sample_case(1, 49152),
        make_sample_case(5, 1000),
        make_sample_case(32, 131),
        make_sample_case(3, 5000),
        make_sample_case(0, 256),
    ],
    tolerances={torch.float32: Tolerance(0.0, 0.0, "token ids; sums may differ at a border")},
)
def sample(logits: Tensor, temperature: Tensor, floor: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """A draw from softmax(logits / temperature) restricted to logits >= floor; inverse of the cumulated probability.
    Where temperature is 0 the first of the highest.

    logits: float32 or the activations' dtype [S, V]; temperature: float32 [S], >= 0; floor: float32 [S], at most the
    row's maximum; seeds: int64 [S] (bits of the uint64); positions: int64 [S], the output index. Returns int32 [S].
    """
    logits = logits.float()
    if logits.device.type != "cpu":
        drawing = temperature > 0
        drawn = _draw(logits, torch.where(drawing, temperature, 1.0), floor, seeds, positions)
        return torch.where(drawing, drawn, argmax.meaning(logits))
    # a CPU may look, and then does no more than is asked
    rows = (temperature > 0).nonzero().squeeze(1)
    if len(rows) == len(logits):
        return _draw(logits, temperature, floor, seeds, positions)
    tokens = argmax.meaning(logits)
    if len(rows):
        tokens[rows] = _draw(logits[rows], temperature[rows], floor[rows], seeds[rows], positions[rows])
    return tokens
