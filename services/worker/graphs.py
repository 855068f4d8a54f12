"""Decode steps as captured graphs, one per batch size. Owner: the runner; made once at the end of start-up.

`sizes` and `choose` are pure: they alone decide whether a step is replayed and with how many rows. A graph covers the
whole step: token ids from the rows, the layers, logits, a greedy or temperature draw, the new ids back into the rows.
It reads its inputs from one place that all graphs share, in the layout of its size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.staging import Array, aligned, offsets, view
from services.worker.state import Rows, Step

RING = 16  # steps whose sampled tokens may not have been taken yet; eight plans at most are in flight


class GraphKey(NamedTuple):
    """Which graph: `size` rows, padding included."""

    size: int


def sizes(max_rows: int, limit: int) -> tuple[int, ...]:
    """Batch sizes to capture: close together where a padded row costs most. Ascending; none for a limit of 0."""
    largest = min(max_rows, limit)
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)]
    wanted = [size for size in steps if size < largest]
    return (*wanted, largest) if largest > 0 else ()


def choose(step: Step, captured: Sequence[int]) -> GraphKey | None:
    """The graph for a step: its rows all have one token and sample, and fit. None: run it without one."""
    rows = len(step.slots)
    if not rows or not captured or rows > captured[-1]:
        return None
    if not bool(step.samples.all()) or int(step.counts.max()) > 1:
        return None
    return GraphKey(next(size for size in captured if size >= rows))


class DecodeInputs(NamedTuple):
    """What a graph of B rows reads, views of the shared place; inputs.write_decode makes the values."""

    wide: Tensor  # int64 [4, B]: places, positions, KV slots, places of the sampled tokens
    draw: Tensor  # int64 [2, B]: seeds, output indices
    slots: Tensor  # int32 [B]
    context_lens: Tensor  # int32 [B], this step's token included
    temperature: Tensor  # float32 [B]
    ring: Tensor  # int32 [1], line of the results

    @staticmethod
    def blank(size: int) -> tuple[Array, ...]:
        """Zeros in the right dtypes and shapes."""
        return (
            np.zeros((4, size), np.int64),
            np.zeros((2, size), np.int64),
            np.zeros(size, np.int32),
            np.zeros(size, np.int32),
            np.zeros(size, np.float32),
            np.zeros(1, np.int32),
        )

    @classmethod
    def at(cls, place: Tensor, size: int) -> "DecodeInputs":
        columns = cls.blank(size)
        return cls(*(view(place, start, column) for start, column in zip(offsets(columns)[0], columns, strict=True)))

    def attention_rows(self, rows: Rows, query_starts: Tensor) -> AttentionRows:
        assert rows.resident is not None
        size = len(self.slots)
        return AttentionRows(
            query_starts=query_starts[: size + 1],
            context_lens=self.context_lens,
            block_tables=rows.resident,
            block_tokens=rows.block_tokens,
            max_query=1,
            max_context=rows.max_len,
            num_decode=size,
            table_rows=self.slots,
        )


Decode = Callable[[DecodeInputs], Tensor]  # runs the whole step, returns its logits [B, V]


class _Place:
    """Device memory without its owner, as the CUDA array interface describes it."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.itemsize,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def alias(tensor: Tensor) -> Tensor:
    """The same memory without keeping it: what a graph leaves in the pool may be overwritten by the next one."""
    return torch.as_tensor(_Place(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    place: Tensor  # uint8, the inputs
    logits: Tensor  # [B, V], an alias, valid until the next replay


class Graphs:
    def __init__(self, device: torch.device, largest: int) -> None:
        self._place = torch.zeros(aligned(offsets(DecodeInputs.blank(largest))[1]), dtype=torch.uint8, device=device)
        self._captured: dict[int, Captured] = {}
        self._pool: Any = None  # of memory, shared by all graphs
        self.sizes: tuple[int, ...] = ()

    def capture(
        self,
        wanted: Sequence[int],
        columns: Callable[[int], Sequence[Array]],
        decode: Decode,
        report: Callable[[int, int], None],
    ) -> None:
        """Captures `decode` for every size, the largest first, so that the others fit into its memory.

        `columns` gives inputs of a size that harm nothing. Each step runs once before, which compiles its kernels.
        """
        for done, size in enumerate(sorted(wanted, reverse=True)):
            report(done, len(wanted))
            self._captured[size] = self._capture(size, columns(size), decode)
        self.sizes = tuple(sorted(wanted))

    def _capture(self, size: int, columns: Sequence[Array], decode: Decode) -> Captured:
        inputs = DecodeInputs.at(self._place, size)
        for target, column in zip(inputs, columns, strict=True):
            target.copy_(torch.from_numpy(column))
        decode(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = decode(inputs)
        self._pool = self._pool or graph.pool()
        return Captured(graph, self._place[: offsets(columns)[1]], alias(logits))

    def replay(self, key: GraphKey, staged: Tensor) -> Tensor:
        """staged: uint8, the inputs in their layout on the device. Returns the logits, valid until the next replay."""
        captured = self._captured[key.size]
        captured.place.copy_(staged, non_blocking=True)
        captured.graph.replay()
        return captured.logits
