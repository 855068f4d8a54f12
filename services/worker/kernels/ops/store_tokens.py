"""The last op of a step: sampled tokens into their rows, for the next step, and into a line that the host reads."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op


def make_store_case(num_sampled: int, ring_size: int, resident: bool, some: bool = False) -> Case:
    def make(dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        generator = torch.Generator().manual_seed(num_sampled)
        tokens = torch.randint(0, 1000, (max(num_sampled, 1), 9), generator=generator, dtype=torch.int32)
        places = torch.randperm(tokens.numel(), generator=generator)[:num_sampled]
        sampled = torch.randint(0, 1000, (num_sampled,), generator=generator, dtype=torch.int32)
        results = torch.zeros(ring_size, num_sampled + 2, dtype=torch.int32) if resident else None
        ring = torch.tensor([ring_size - 1], dtype=torch.int32) if resident else None
        columns = torch.randperm(num_sampled + 2, generator=generator)[:num_sampled] if some else None
        return tokens, results, places, sampled, ring, columns

    return Case(f"{num_sampled}{f'ring{ring_size}' if resident else ''}{'some' if some else ''}", make)


EXACT = Tolerance(0.0, 0.0, "integers")


@op(
    cases=[
        make_store_case(1, 4, True),
        make_store_case(300, 3, True),
        make_store_case(7, 1, False),
        make_store_case(9, 2, True, True),
    ],
    tolerances={torch.float32: EXACT},
    writes=("tokens", "results"),
)
def store_tokens(
    tokens: Tensor,
    results: Tensor | None,
    places: Tensor,
    sampled: Tensor,
    ring: Tensor | None,
    columns: Tensor | None,
) -> None:
    """tokens.view(-1)[places] = sampled and results[ring[0], columns] = sampled, both in place.

    tokens: int32 [rows, L], contiguous; results: int32 [ring size, at least S] or None, on a GPU pinned memory of the
    host; places: int64 [S], distinct; sampled: int32 [S]; ring: int32 [1], which line of results is this step's, or
    None; columns: int64 [S], distinct, or None: 0 .. S - 1.
    """
    tokens.view(-1).index_copy_(0, places, sampled)
    if results is not None and ring is not None:
        where = torch.arange(len(sampled), device=sampled.device) if columns is None else columns
        line = results[int(ring)]  # of the host's memory, which torch writes by way of the host
        line.index_copy_(0, where.to(line.device), sampled.to(line.device))
