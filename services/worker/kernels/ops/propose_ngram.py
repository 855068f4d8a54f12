"""Drafts by prompt lookup (Saxena 2023): what followed the last time that the row's newest tokens occurred in it."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op

EXACT = Tolerance(0.0, 0.0, "integers")


def make_ngram_case(lengths: tuple[int, ...], kinds: int, most: int, shortest: int, longest: int) -> Case:
    """Rows of tokens of few kinds, so that there is much to find."""

    def make(dtype: torch.dtype) -> tuple[Tensor | int, ...]:
        generator = torch.Generator().manual_seed(sum(lengths))
        tokens = torch.randint(0, kinds, (len(lengths) + 1, max(lengths) + most + 3), generator=generator)
        drafted = torch.full((len(lengths) + 1,), 9, dtype=torch.int32)
        # each row's second entry, and one that is nothing
        offsets = torch.tensor([0, 1] * len(lengths) + [-1], dtype=torch.int32)
        slots = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(2)
        slots = torch.cat((slots, torch.tensor([len(lengths)], dtype=torch.int32)))
        full = torch.tensor([*lengths, 1])
        return tokens.to(torch.int32), drafted, full, slots, offsets, most, shortest, longest

    return Case(f"{len(lengths)}of{kinds}x{most}", make)


@op(
    cases=[
        make_ngram_case((1, 2, 3, 9, 70), 3, 4, 1, 3),
        make_ngram_case((300, 5, 1500), 6, 8, 2, 4),
        make_ngram_case((40,), 50, 3, 1, 2),
    ],
    tolerances={torch.float32: EXACT},
    writes=("tokens", "drafted"),
    by_value=True,
)
def propose_ngram(
    tokens: Tensor,
    drafted: Tensor,
    lengths: Tensor,
    slots: Tensor,
    offsets: Tensor,
    most: int,
    shortest: int,
    longest: int,
) -> None:
    """For each entry of offset 0: finds where the last n tokens of row slots[j] occurred before, for the largest n up
    to `longest`, and of these places the last one. What followed there, repeated if it is shorter, becomes `most`
    drafts behind the row's tokens, and drafted[slots[j]] = most. Where n would be less than `shortest`: 0, no drafts.

    tokens: int32 [rows, L], contiguous, L >= lengths + most; drafted: int32 [rows]; lengths: int64 [rows], at least 1;
    slots, offsets: int32 [S].
    """
    rows = slots[offsets == 0].long()
    if not len(rows):
        return
    length = lengths[rows][:, None]
    width = int(length.max())
    known = tokens[rows, :width]
    ends = torch.arange(width, device=tokens.device)[None]  # candidates: what ends before this place
    found = torch.zeros(known.shape, dtype=torch.int64, device=tokens.device)
    running = (ends >= 1) & (ends < length)
    for back in range(1, longest + 1):
        newest = known.gather(1, (length - back).clamp(min=0))
        running = running & (ends >= back) & (length >= back)
        running = running & (known.roll(back, 1) == newest)
        found += running
    place = torch.where(found >= shortest, found * width + ends, -1).amax(1)
    end = torch.where(place >= 0, place % width, 0)[:, None]
    ahead = torch.arange(most, device=tokens.device)[None]
    drafts = known.gather(1, end + ahead % (length - end).clamp(min=1))
    hit = place >= 0
    tokens[rows[hit, None], (length + ahead)[hit]] = drafts[hit]
    drafted[rows] = torch.where(hit, most, 0).to(torch.int32)
