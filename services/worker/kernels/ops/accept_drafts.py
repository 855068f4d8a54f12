"""The last op of a step with drafts: which of them hold. A draft holds if it is what was drawn in its place.

The draw is that of a step without drafts (ops/draw.py, ops/sample.py): its number depends on seed and position only. So
the output is the same token for token, at any temperature (docs/adr/0030-speculative-decoding.md).
"""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op

MOST = 8  # drafts of one row
EXACT = Tolerance(0.0, 0.0, "integers")


def make_accept_case(rows: tuple[int, ...], num_plain: int, with_results: bool = True) -> Case:
    """`rows`: drafts of each; a third of what was drawn is what was drafted, or more."""

    def make(dtype: torch.dtype) -> tuple[Tensor | None, ...]:
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
        return tokens, torch.zeros(num_slots, dtype=torch.int64), results, slot, context, offset, ids, drawn, ring

    return Case(f"{'+'.join(map(str, rows))}and{num_plain}", make)


@op(
    cases=[
        make_accept_case((4,), 0),
        make_accept_case((8, 0, 3, 1, 8), 2),
        make_accept_case((4,) * 70, 3),
        make_accept_case((), 2, with_results=False),
    ],
    tolerances={torch.float32: EXACT},
    writes=("tokens", "lengths", "results"),
    by_value=True,
)
def accept_drafts(
    tokens: Tensor,
    lengths: Tensor,
    results: Tensor | None,
    slots: Tensor,
    context_lens: Tensor,
    offsets: Tensor,
    ids: Tensor,
    drawn: Tensor,
    ring: Tensor | None,
) -> None:
    """Entry t is what was drawn behind `context_lens[t]` tokens of row `slots[t]`; a row's entries follow each other,
    with offsets 0, 1, ... and ids[t + 1] the draft that stands where drawn[t] belongs. Entry t is kept if all drafts of
    the row up to it hold. Kept ones go into tokens[slots[t], context_lens[t]], and the row's lengths behind the last.
    Entries with offset -1 are nothing.

    tokens: int32 [rows, L], contiguous; lengths: int64 [rows]; results: int32 [ring size, W] or None, on a GPU pinned
    memory of the host: in line ring[0] (int32 [1]) the first half is `drawn`, the second whether they were kept;
    slots, context_lens, offsets, drawn: int32 [S], S <= W / 2; ids: int32 [T], T >= S.
    """
    count = len(drawn)
    holds = torch.zeros(count, dtype=torch.bool, device=drawn.device)
    holds[:-1] = (drawn[:-1] == ids[1:count]) & (offsets[1:] > 0)
    kept = offsets >= 0
    for back in range(1, min(MOST + 1, count)):
        kept[back:] &= holds[:-back] | (offsets[back:] < back)
    last = kept & ~holds
    tokens[slots[kept].long(), context_lens[kept].long()] = drawn[kept]
    lengths[slots[last].long()] = context_lens[last].long() + 1
    if results is not None and ring is not None:
        line = results[int(ring)]
        line[:count] = drawn
        line[len(line) // 2 : len(line) // 2 + count] = kept.int()
