"""One process's place in a tensor-parallel group: how its ranks meet, and what they agree on while they start.

Owner: the engine, which joins before it loads anything. Ranks meet in a file of the run directory; collectives are
those of torch's default process group: NCCL's (RCCL's) on GPUs, gloo's on a CPU, on the loopback interface only. Nobody
waits for the dead: a group whose process has died ends as a whole (ranks.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from common import env
from services.worker.kernels.ops.all_reduce import all_reduce
from services.worker.kernels.ops.all_reduce_add_norm import all_reduce_add_norm
from services.worker.kernels.registry import Op
from services.worker.shares import Rank

PATIENCE = timedelta(days=1)  # kernels may be built for long; who is stuck is found by the scheduler's deadlines
TRIED_TOKENS = (1, 16, 2048)  # small sums and large ones are not done in one way
EPS = 1e-6
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class Place(NamedTuple):
    """What a process knows of its group before it imports torch. `meeting`: a file that does not exist yet."""

    rank: int
    ranks: int
    meeting: str


class Group:
    def __init__(self, place: Place, device: torch.device) -> None:
        """Waits for all ranks."""
        self.rank = Rank(place.rank, place.ranks)
        env.set_defaults(LOOPBACK)
        self._store = dist.FileStore(place.meeting, place.ranks)  # type: ignore[attr-defined]
        self._store.set_timeout(PATIENCE)
        self._told = 0  # how often something was agreed on; the same at all ranks
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=dist.PrefixStore("collectives", self._store),  # type: ignore[attr-defined]
            rank=place.rank,
            world_size=place.ranks,
            timeout=PATIENCE,
            device_id=None if device.type == "cpu" else device,
        )

    @property
    def leads(self) -> bool:
        return self.rank.rank == 0

    def tell(self, value: str) -> list[str]:
        """What each rank tells here, by rank; waits for all. Every rank calls in the same order."""
        self._told += 1
        self._store.set(f"{self._told}/{self.rank.rank}", value)
        return [self._store.get(f"{self._told}/{rank}").decode() for rank in range(self.rank.ranks)]

    def meet(self) -> None:
        """Returns when all ranks have come here."""
        self.tell("")

    def least(self, number: int) -> int:
        return min(int(value) for value in self.tell(str(number)))

    def leave(self) -> None:
        """Every rank does, at about the same time."""
        dist.destroy_process_group()

    def sums_rightly(self, run: Callable[[torch.Tensor], None], dtype: torch.dtype, width: int) -> bool:
        """Whether sums by `run` are those of the process group at all ranks, for one token, and for many."""
        right = True
        for x, _ in self._trials(dtype, width):
            wanted = x.clone()
            run(x)
            dist.all_reduce(wanted)
            right &= _near(all_reduce, x, wanted)
        return bool(self.least(int(right)))

    def norms_rightly(self, run: Callable[..., torch.Tensor], dtype: torch.dtype, width: int) -> bool:
        """The same of `run` as the op all_reduce_add_norm."""
        right = True
        for x, residual in self._trials(dtype, width):
            weight, share, stream = residual[0].abs() + 0.5, x.clone(), residual.clone()
            wanted = all_reduce_add_norm.meaning(share, stream, weight, EPS)
            right &= _near(all_reduce_add_norm, run(x, residual, weight, EPS), wanted)
            right &= _near(all_reduce_add_norm, residual, stream)
        return bool(self.least(int(right)))

    def _trials(self, dtype: torch.dtype, width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A share of this rank's own, and a residual stream that all have; each [T, width]."""
        device = torch.device("cpu") if dist.get_backend() == "gloo" else torch.device("cuda")
        for num_tokens in TRIED_TOKENS:
            own, common = (torch.Generator().manual_seed(seed) for seed in (self.rank.rank, num_tokens))
            x, residual = (torch.randn(num_tokens, width, generator=generator) for generator in (own, common))
            yield x.to(device, dtype), residual.to(device, dtype)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The body runs at rank 0 first, then at all others: they find what it has left in files."""
        if not self.leads:
            self.meet()
        yield
        if self.leads:
            self.meet()

    def must_equal(self, what: str, value: str) -> None:
        """Raises RuntimeError if ranks differ: their steps would not fit together."""
        values = self.tell(value)
        if len(set(values)) > 1:
            raise RuntimeError(f"the ranks of this group have different {what}: {', '.join(values)}")


def _near(op: Op[Any], got: torch.Tensor, wanted: torch.Tensor) -> bool:
    near = op.tolerances[wanted.dtype]
    return torch.allclose(got, wanted, near.relative, near.absolute)
