"""`python -m tests.services.worker.together MEETING RANKS`: a group of so many ranks without a model.

Prints as JSON, by rank, what test_group.py and quant/test_sharded.py hold against each other and against one process.
"""

import json
import os
import sys
from typing import Any

import psutil
import torch
from torch import distributed as dist

from services.worker.group import Group, Place
from services.worker.kernels.ops.all_reduce import all_reduce
from services.worker.kernels.ops.all_reduce_add_norm import all_reduce_add_norm
from services.worker.kernels.registry import Facts, bind
from services.worker.quant.none import DenseWeight
from services.worker.quant.sharded import SummedExperts, SummedWeight, VocabularyWeight
from services.worker.shares import Rank
from tests.services.worker.forked import said_by

VOCABULARY, HIDDEN, INNER = 37, 24, 21
LIBRARIES = ("GLOO", "NCCL")
BINDINGS = bind(("torch",), Facts("cpu"))


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).flatten().tolist()


class Doubled:
    """Experts that add twice the first weight of each token times its input."""

    num_experts, format_name, num_bytes = 4, "doubled", 0

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> None:
        residual.add_(2 * weights[:, :1] * x)


def agreements(group: Group) -> dict[str, Any]:
    rank = group.rank.rank
    with group.first_alone():
        order = noted(rank)
    said: dict[str, Any] = {"told": group.tell(f"rank {rank}"), "least": group.least(100 - rank), "order": order}
    group.must_equal("digest", "same")
    try:
        group.must_equal("digest", f"own {rank}")
    except RuntimeError as error:
        said["unequal"] = str(error)
    return said


def noted(rank: int) -> list[str]:
    """The ranks that were here before, and this one."""
    with open(f"{sys.argv[1]}.order", "a+") as file:
        file.write(f"{rank}\n")
        file.flush()
        file.seek(0)
        return file.read().split()


def weights(rank: Rank) -> dict[str, Any]:
    table, down, bias = values(VOCABULARY, HIDDEN), values(HIDDEN, INNER, seed=1), values(HIDDEN, seed=2)
    x, inner, ids = values(5, HIDDEN, seed=3), values(5, INNER, seed=4), torch.tensor([0, 36, 17, 12, 13])
    rows, columns = rank.of(VOCABULARY), rank.of(INNER)
    starts = [rank._replace(rank=r).of(VOCABULARY).begin for r in range(rank.ranks)] + [VOCABULARY]
    vocabulary = VocabularyWeight(DenseWeight(table[slice(*rows)]), starts, rank.rank, BINDINGS)
    summed = SummedWeight(DenseWeight(down[:, slice(*columns)].contiguous()), BINDINGS)
    residual = torch.ones(5, HIDDEN)
    SummedExperts(Doubled(), BINDINGS).add_to(residual, x, values(5, 2, seed=5), torch.zeros(5, 2, dtype=torch.int32))
    share = inner[:, slice(*columns)].contiguous()
    return {
        "embedded": bits(vocabulary.embed(ids)),
        "nothing": list(vocabulary.linear(x[:0]).shape),
        "logits": bits(vocabulary.linear(x)),
        "summed": bits(summed.linear(share, bias if rank.rank == 0 else torch.zeros(HIDDEN))),
        "experts": bits(residual),
    }


def wrong_at_last(x: torch.Tensor) -> None:
    """The sum, but for large ones at the last rank."""
    all_reduce.meaning(x)
    if len(x) > 100 and dist.get_rank() == dist.get_world_size() - 1:
        x[-1] += 1


def norms(group: Group) -> list[bool]:
    """Of one that is right, of one that leaves the last rank's residual stream, and of one whose norm is another."""

    def keeps(share: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        last = group.rank.rank == group.rank.ranks - 1
        return all_reduce_add_norm.meaning(share, residual.clone() if last else residual, weight, eps)

    def other(share: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return all_reduce_add_norm.meaning(share, residual, weight + 1, eps)

    return [group.norms_rightly(run, torch.bfloat16, HIDDEN) for run in (all_reduce_add_norm.meaning, keeps, other)]


def be_rank(rank: int) -> dict[str, Any]:
    group = Group(Place(rank, int(sys.argv[2]), sys.argv[1]), torch.device("cpu"))
    said = agreements(group) | weights(group.rank)
    for dtype in (torch.float32, torch.bfloat16):
        x = values(3, 1000, seed=group.rank.rank).to(dtype)
        all_reduce.meaning(x)
        said[str(dtype)] = bits(x)
    said["sums"] = [group.sums_rightly(run, torch.bfloat16, HIDDEN) for run in (all_reduce.meaning, wrong_at_last)]
    said["norms"] = norms(group)
    said |= {"listens": listening(), "interfaces": [os.environ.get(f"{name}_SOCKET_IFNAME") for name in LIBRARIES]}
    group.meet()
    dist.destroy_process_group()
    return said


def listening() -> list[str]:
    """Addresses at which this process takes connections."""
    return [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]


if __name__ == "__main__":
    print(json.dumps(said_by(int(sys.argv[2]), be_rank)))
