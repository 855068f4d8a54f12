"""Repetition (Keskar et al. 2019), frequency and presence penalties on logits, in place, for rows that have one."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op


def make_penalty_case(num_rows: int, num_slots: int, vocab_size: int) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(num_rows)
        logits = torch.randn(num_rows, vocab_size, generator=generator).to(dtype).float()
        index = torch.arange(1, num_rows, 2)
        slots = torch.randperm(num_slots, generator=generator)[: len(index)]
        in_output = torch.randint(0, 4, (num_slots, vocab_size), generator=generator, dtype=torch.int32)
        in_prompt = torch.rand(num_slots, vocab_size, generator=generator) < 0.3
        presence, frequency, repetition = torch.rand(3, len(index), generator=generator).unbind(0)
        return logits, index, slots, in_output, in_prompt, presence, frequency, repetition + 0.7

    return Case(f"{num_rows}of{num_slots}x{vocab_size}", make)


@op(
    cases=[make_penalty_case(2, 3, 49152), make_penalty_case(6, 9, 77), make_penalty_case(1, 2, 64)],
    tolerances={torch.float32: Tolerance(1e-6, 1e-6, "division against multiplication by the inverse")},
    writes=("logits",),
)
def penalize(
    logits: Tensor,
    index: Tensor,
    slots: Tensor,
    in_output: Tensor,
    in_prompt: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """In rows `index` of logits, first divides (positive) or multiplies (negative) seen tokens' logits by `repetition`,
    then subtracts count * frequency + (count > 0) * presence. Seen is in the prompt or in the output.

    logits: float32 [S, V], changed; index: int64 [P], no row twice; slots: int64 [P], each one's row in in_output
    (int32 [R, V], how often) and in_prompt (bool [R, V]); presence, frequency, repetition: float32 [P].
    """
    rows, counts, seen = logits[index], in_output[slots], in_prompt[slots]
    used = counts > 0
    factor = torch.where(rows > 0, 1.0 / repetition[:, None], repetition[:, None])
    rows = torch.where(seen | used, rows * factor, rows)
    logits[index] = rows.sub_(counts * frequency[:, None]).sub_(used * presence[:, None])
