"""Repetition (Keskar et al. 2019), frequency and presence penalties on logits. Only for rows that have one."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op


def make_penalty_case(num_rows: int, vocab_size: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(num_rows)
        logits = torch.randn(num_rows, vocab_size, generator=generator).to(dtype).float()
        counts = torch.randint(0, 4, (num_rows, vocab_size), generator=generator, dtype=torch.int32)
        in_prompt = torch.rand(num_rows, vocab_size, generator=generator) < 0.3
        presence, frequency, repetition = torch.rand(3, num_rows, generator=generator).unbind(0)
        return logits, counts, in_prompt, presence, frequency, repetition + 0.7

    return Case(f"{num_rows}x{vocab_size}", make)


@op(
    cases=[make_penalty_case(1, 49152), make_penalty_case(6, 77), make_penalty_case(0, 64)],
    tolerances={torch.float32: Tolerance(1e-6, 1e-6, "division against multiplication by the inverse")},
)
def penalize(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """First divides (positive) or multiplies (negative) seen tokens' logits by `repetition`, then subtracts
    counts * frequency + (counts > 0) * presence.

    logits: float32 [S, V]; counts: int32 [S, V], in the output; in_prompt: bool [S, V]; the others float32 [S].
    Seen is in the prompt or in the output. Returns a new [S, V].
    """
    in_output = counts > 0
    factor = torch.where(logits > 0, 1.0 / repetition[:, None], repetition[:, None])
    changed = torch.where(in_prompt | in_output, logits * factor, logits)
    return changed.sub_(counts * frequency[:, None]).sub_(in_output * presence[:, None])
