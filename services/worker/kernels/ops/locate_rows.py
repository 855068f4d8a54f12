"""The first op of a step with drafts: where rows stand that only the device knows. The host has written the highest."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op

EXACT = Tolerance(0.0, 0.0, "integers")


def make_locate_case(counts: tuple[int, ...], block_tokens: int, padding: int, line: int = 2) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor | int, ...]:
        generator = torch.Generator().manual_seed(len(counts))
        slots = [slot for slot, count in enumerate(counts) for _ in range(count)] + [len(counts)] * padding
        offsets = [offset for count in counts for offset in range(count)] + [-1] * padding
        slot, offset = torch.tensor(slots, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int32)
        lengths = torch.randint(1, 40, (len(counts) + 1,), generator=generator)
        tables = torch.randperm((len(counts) + 1) * 50, generator=generator).view(len(counts) + 1, 50).to(torch.int32)
        lost = torch.randint(0, 9, (len(counts) + 1,), generator=generator)
        high = (lengths - 1 + lost)[slot.long()] + offset
        columns = torch.stack((slot * 70 + high, *[high] * (line + 1))), torch.stack((high, high, high + 1 - 5, high))
        return lengths, tables, slot, offset, *columns, (high + 1).to(torch.int32), block_tokens, line

    return Case(f"{sum(counts)}in{len(counts)}by{block_tokens}line{line}", make)


@op(
    cases=[
        make_locate_case((5,), 16, 0),
        make_locate_case((1, 4, 9, 2), 4, 3),
        make_locate_case((5,) * 80, 1, 1),
        make_locate_case((1, 3, 2), 8, 2, line=4),
    ],
    tolerances={torch.float32: EXACT},
    writes=("columns", "draw", "context_lens"),
)
def locate_rows(
    lengths: Tensor,
    tables: Tensor,
    slots: Tensor,
    offsets: Tensor,
    columns: Tensor,
    draw: Tensor,
    context_lens: Tensor,
    block_tokens: int,
    line: int = 2,
) -> None:
    """Entry j is token offsets[j] behind the newest of row slots[j], which has lengths[slots[j]] tokens. Moves the
    entry's place, position, KV slot, output index and context there, from where the host has put them. What has moved
    already stays, so that each group of layers may be asked for with its own tables, and `line` of KV slots.

    lengths: int64 [rows]; tables: int32 [rows, M], contiguous; slots, offsets: int32 [D], -1: the entry stays;
    columns: int64 [line + 1 or more, T], T >= D, places, positions, ... KV slots; draw: int64 [4, R], R >= D, its
    third line is the output index; context_lens: int32 [R].
    """
    count = len(slots)
    rows = slots.long()
    positions = columns[1, :count].clone()
    moved = torch.where(offsets >= 0, lengths[rows] - 1 + offsets, positions)
    change = moved - positions
    columns[0, :count] += change
    columns[1, :count] = moved
    draw[2, :count] += change
    context_lens[:count] += change.to(torch.int32)
    slot = tables[rows, moved // block_tokens].long() * block_tokens + moved % block_tokens
    columns[line, :count] = torch.where(offsets >= 0, slot, columns[line, :count])
