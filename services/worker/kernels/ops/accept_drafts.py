"""The last op of a step with drafts: which of them hold. A draft holds if it is what was drawn in its place.

The draw is that of a step without drafts (ops/draw.py, ops/sample.py): its number depends on seed and position only. So
the output is the same token for token, at any temperature (docs/adr/0030-speculative-decoding.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op

MOST = 8  # drafts of one row
EXACT = Tolerance(0.0, 0.0, "integers")


class Drawn(NamedTuple):
    """What a step has drawn, by entry, and the tokens that it has run. S entries, T tokens, T >= S."""

    slots: Tensor  # int32 [S]
    context_lens: Tensor  # int32 [S]: of the row, where it was drawn
    offsets: Tensor  # int32 [S]: of the token before behind the row's newest one; -1: the entry is nothing
    ids: Tensor  # int32 [T]; of entries with drafts, which come first, those of the same number
    tokens: Tensor  # int32 [S]


def make_accept_case(rows: tuple[int, ...], num_plain: int, with_results: bool = True) -> Case:
    """`rows`: drafts of each; a third of what was drawn is what was drafted, or more."""

    def make(dtype: torch.dtype) -> tuple[Tensor | Drawn | None, ...]:
        generator = torch.Generator().manual_seed(sum(rows) + num_plain)
        offsets = [offset for drafts in rows for offset in range(drafts + 1)] + [0, -1] * num_plain
        slots = [slot for slot, drafts in enumerate(rows) for _ in range(drafts + 1)]
        slots += range(len(rows), len(rows) + 2 * num_plain)
        count, num_slots = len(offsets), len(rows) + 2 * num_plain + 1
        tokens = torch.randint(0, 3, (num_slots, 64), generator=generator, dtype=torch.int32)
        start = torch.randint(1, 50, (num_slots,), generator=generator)
        offset, slot = torch.tensor(offsets, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
        context = (start[slot.long()] + offset.clamp(min=0)).to(torch.int32)
        ids = torch.randint(0, 3, (count,), generator=generator, dtype=torch.int32)
        drawn = torch.randint(0, 3, (count,), generator=generator, dtype=torch.int32)
        drawn[: count // 2] = ids.roll(-1)[: count // 2]
        results = torch.zeros(2, 2 * count + 6, dtype=torch.int32) if with_results else None
        ring = torch.tensor([1], dtype=torch.int32) if with_results else None
        entries = Drawn(slot, context, offset, ids, drawn)
        lengths, held = torch.zeros(num_slots, dtype=torch.int64), torch.full((num_slots,), 9, dtype=torch.int32)
        return tokens, lengths, held, results, entries, ring

    return Case(f"{'+'.join(map(str, rows))}and{num_plain}", make)


@op(
    cases=[
        make_accept_case((4,), 0),
        make_accept_case((8, 0, 3, 1, 8), 2),
        make_accept_case((4,) * 70, 3),
        make_accept_case((), 2, with_results=False),
    ],
    tolerances={torch.float32: EXACT},
    writes=("tokens", "lengths", "held", "results"),
    by_value=True,
)
def accept_drafts(
    tokens: Tensor, lengths: Tensor, held: Tensor, results: Tensor | None, drawn: Drawn, ring: Tensor | None
) -> None:
    """A row's entries follow each other, with offsets 0, 1, ...; ids[t + 1] is then the draft that stands where token t
    belongs. Entry t is kept if all drafts of the row up to it hold. Kept tokens go into
    tokens[slots[t], context_lens[t]], the row's lengths behind the last, and how many drafts held.

    tokens: int32 [rows, L], contiguous; lengths: int64 [rows]; held: int32 [rows]; results: int32 [ring size, W],
    W >= 2 S, or None, on a GPU pinned memory of the host: in line ring[0] (int32 [1]) first what was drawn, in its
    second half what was kept.
    """
    slots, context_lens, offsets, ids, drawn_tokens = drawn
    count = len(drawn_tokens)
    holds = torch.zeros(count, dtype=torch.bool, device=ids.device)
    holds[:-1] = (drawn_tokens[:-1] == ids[1:count]) & (offsets[1:] > 0)
    kept = offsets >= 0
    for back in range(1, min(MOST + 1, count)):
        kept[back:] &= holds[:-back] | (offsets[back:] < back)
    last = kept & ~holds
    tokens[slots[kept].long(), context_lens[kept].long()] = drawn_tokens[kept]
    lengths[slots[last].long()] = context_lens[last].long() + 1
    held[slots[last].long()] = offsets[last]
    if results is not None and ring is not None:
        line = results[int(ring)]
        line[:count] = drawn_tokens
        line[len(line) // 2 : len(line) // 2 + count] = kept.int()
