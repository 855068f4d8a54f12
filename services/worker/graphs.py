"""Steps as captured graphs, one per layout of a step. Owner: the runner; made once at the end of start-up.

A layout has places for rows that decode, one token each, and behind them places for the tokens of chunks of prompts.
`layouts` and `choose` are pure: they alone decide which are captured, and whether a step is replayed and in which. A
graph covers the whole step: token ids from the rows, the layers, logits, a greedy or temperature draw, the new ids back
into the rows. It reads its inputs from one place that all graphs share, in the form of its layout.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.groups import GroupStep
from services.worker.kernels.draft_entries import DraftEntries
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.staging import Array, aligned, arrays, offsets, view
from services.worker.state import Rows, Step

DECODE_BESIDE = (0, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)  # rows that decode, in layouts with chunks
CHUNK_TOKENS = (128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)  # beyond, the device takes longer than the host
TOKENS_PER_CHUNK = 32  # a layout has a row for so many tokens of chunks, and one for what pads them
LONG_CONTEXT = 16_384  # chunks behind more than this have layouts of their own, where many parts of it are read at once
LONG_DECODE = (16, 64, 128, 256, 512)
LONG_CHUNK_TOKENS = (128, 256, 512, 768)
LONG_ROWS = 5  # of chunks in such a layout
USUAL_CONTEXT = 2000  # what the attention of other chunks is laid out for; any length is right


class GraphKey(NamedTuple):
    """A layout: places for `decode` rows of one token and for `chunk` tokens of other rows, `long`: far in a prompt."""

    decode: int
    chunk: int = 0
    long: bool = False

    @property
    def chunk_rows(self) -> int:
        """Rows of chunks; the last one holds what pads them."""
        most = self.chunk // TOKENS_PER_CHUNK + 1 if self.chunk else 0
        return min(most, LONG_ROWS) if self.long else most

    @property
    def rows(self) -> int:
        return self.decode + self.chunk_rows

    @property
    def tokens(self) -> int:
        return self.decode + self.chunk


def decode_sizes(max_rows: int, limit: int) -> tuple[int, ...]:
    """Batch sizes of pure decode steps: close together where a padded row costs most. Ascending."""
    largest = min(max_rows, limit)
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, limit + 1, 16)]
    wanted = [size for size in steps if size < largest]
    return (*wanted, largest) if largest > 0 else ()


def layouts(max_rows: int, limit: int, step_tokens: int, max_len: int) -> tuple[GraphKey, ...]:
    """All that are captured, for at most `limit` rows that decode; none for a limit of 0."""
    sizes = decode_sizes(max_rows, limit)
    if not sizes:
        return ()
    most = min(step_tokens, max_len)

    def mixed(chunks: Sequence[int], decodes: Sequence[int], long: bool) -> Iterator[GraphKey]:
        beside = [size for size in decodes if size < sizes[-1]] + [sizes[-1]]
        fitting = [tokens for tokens in chunks if tokens <= most]
        return (GraphKey(decode, chunk, long) for chunk in fitting for decode in beside if decode < step_tokens)

    behind_much = mixed(LONG_CHUNK_TOKENS, LONG_DECODE, True) if max_len > LONG_CONTEXT else ()
    return (*(GraphKey(size) for size in sizes), *mixed(CHUNK_TOKENS, DECODE_BESIDE, False), *behind_much)


class Choice(NamedTuple):
    """A layout, and which of the step's rows take its places: indices of rows that decode, and of the others."""

    key: GraphKey
    decode: Array
    chunks: Array


def choose(step: Step, captured: Sequence[GraphKey]) -> Choice | None:
    """The smallest layout that holds a step; None: run it without a graph. `captured`: in the order of `layouts`."""
    if not len(step.slots) or not captured:
        return None
    decodes = (step.counts == 1) & step.samples
    decode, chunks = np.flatnonzero(decodes), np.flatnonzero(~decodes)
    tokens = int(step.counts[chunks].sum())
    long = bool(tokens) and int((step.positions + step.counts)[chunks].max()) > LONG_CONTEXT
    for key in captured:
        fits = key.decode >= len(decode) and key.chunk >= tokens and (not tokens or key.chunk_rows > len(chunks))
        if fits and bool(key.chunk) == bool(tokens) and key.long == long:
            return Choice(key, decode, chunks)
    return None


class Tables(NamedTuple):
    """How many groups of either kind a step's inputs are for."""

    paged: int = 1
    states: int = 0


ONE_TABLE = Tables()


class StepColumns(NamedTuple):
    """What the host writes for a graph. T tokens, R rows."""

    tokens: Array  # int64 [2 + paged groups, T]: places, positions, KV slots of each group
    draw: Array  # int64 [4, R]: places of the sampled tokens, seeds, output indices, tokens to sample from
    token_rows: Array  # int32 [T], slots
    slots: Array  # int32 [R]
    context_lens: Array  # int32 [R], this step's tokens included
    query_starts: Array  # int32 [R + 1]
    temperature: Array  # float32 [R]
    ring: Array  # int32 [1], line of the results
    states: Array  # int64 [groups of states, R]: live blocks
    offsets: Array  # int32 [R], as drafts.Entries has them; only with drafts
    begins: Array  # int64 [3, R], as drafts.Seen has them; only with drafts

    @classmethod
    def blank(cls, key: GraphKey, tables: Tables = ONE_TABLE) -> "StepColumns":
        """Zeros in the right dtypes and shapes."""
        return cls(
            np.zeros((2 + tables.paged, key.tokens), np.int64),
            np.zeros((4, key.rows), np.int64),
            np.zeros(key.tokens, np.int32),
            np.zeros(key.rows, np.int32),
            np.zeros(key.rows, np.int32),
            np.zeros(key.rows + 1, np.int32),
            np.zeros(key.rows, np.float32),
            np.zeros(1, np.int32),
            np.zeros((tables.states, key.rows), np.int64),
            np.zeros(key.rows, np.int32),
            np.zeros((3, key.rows), np.int64),
        )


class HostInputs(NamedTuple):
    """Columns in memory of the host, one behind the other as `offsets` says."""

    columns: StepColumns
    buffer: Array  # uint8, all of them

    @classmethod
    def blank(cls, key: GraphKey, tables: Tables = ONE_TABLE) -> "HostInputs":
        like = StepColumns.blank(key, tables)
        starts, size = offsets(like)
        buffer = np.zeros(size, np.uint8)
        return cls(StepColumns(*arrays(buffer, starts, like)), buffer)


class StepInputs(NamedTuple):
    """The same on the device, views of the shared place."""

    tokens: Tensor
    draw: Tensor
    token_rows: Tensor
    slots: Tensor
    context_lens: Tensor
    query_starts: Tensor
    temperature: Tensor
    ring: Tensor
    states: Tensor
    offsets: Tensor
    begins: Tensor

    @classmethod
    def at(cls, place: Tensor, key: GraphKey, tables: Tables = ONE_TABLE) -> "StepInputs":
        columns = StepColumns.blank(key, tables)
        return cls(*(view(place, start, column) for start, column in zip(offsets(columns)[0], columns, strict=True)))

    def attention_rows(self, rows: Rows, key: GraphKey) -> AttentionRows:
        assert rows.resident is not None
        return AttentionRows(
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=rows.resident,
            block_tokens=rows.block_tokens,
            max_query=max(key.chunk, 1),
            max_context=min(rows.max_len, USUAL_CONTEXT) if key.chunk and not key.long else rows.max_len,
            num_decode=key.decode,
            table_rows=self.slots,
            drafts=self.draft_entries(rows),
        )

    def draft_entries(self, rows: Rows) -> DraftEntries | None:
        if rows.drafts is None or not rows.has_states:
            return None
        return DraftEntries(self.offsets, self.slots, rows.drafts.held)

    def beside(self, rows: Rows, first: AttentionRows) -> tuple[GroupStep, ...]:
        """Of the groups behind the first one, whose rows are `first`."""
        slots, states = iter(self.tokens[3:].unbind(0)), iter(self.states.unbind(0))
        return tuple(
            GroupStep(next(states), first)
            if more.resident is None
            else GroupStep(next(slots), replace(first, block_tables=more.resident))
            for more in rows.beside
        )


class StepOutputs(NamedTuple):
    """What a graph leaves, valid until the next replay."""

    logits: Tensor  # [R, V]
    drawn: Tensor  # int32 [R]
    ids: Tensor  # int32 [T]
    hidden: Tensor  # the residual stream behind the layers, of all tokens or of those that are sampled from


Forward = Callable[[GraphKey, StepInputs], StepOutputs]  # runs the whole step
Sequel = Callable[[GraphKey, StepInputs, StepOutputs], None]  # what may follow it, as a graph of its own


def alias(tensor: Tensor) -> Tensor:
    """The same memory without keeping it: what a graph leaves in the pool may be overwritten by the next one.

    Made as torch makes the outputs of its own graphs, on NVIDIA and on AMD.
    """
    size = tensor.untyped_storage().nbytes()
    storage = torch._C._construct_storage_from_data_pointer(tensor.untyped_storage().data_ptr(), tensor.device, size)
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    place: Tensor  # uint8, the inputs
    inputs: StepInputs  # views of it
    outputs: StepOutputs  # aliases
    sequel: torch.cuda.CUDAGraph | None = None


class Graphs:
    def __init__(self, device: torch.device, wanted: Sequence[GraphKey], tables: Tables = ONE_TABLE) -> None:
        """`wanted` as `layouts` gives them."""
        self._tables = tables
        size = max(offsets(StepColumns.blank(key, tables))[1] for key in wanted)
        self._place = torch.zeros(aligned(size), dtype=torch.uint8, device=device)
        self._wanted = wanted
        self._captured: dict[GraphKey, Captured] = {}
        on_gpu = device.type != "cpu"
        self._pool: Any = torch.cuda.graph_pool_handle() if on_gpu else None  # memory that all graphs share
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.keys: tuple[GraphKey, ...] = ()

    def capture(
        self,
        columns: Callable[[GraphKey], StepColumns],
        forward: Forward,
        report: Callable[[int, int], None],
        sequel: Callable[[GraphKey], Sequel | None] = lambda key: None,
    ) -> None:
        """Captures `forward` and its `sequel` for every layout, the largest first, so that others fit into its memory.

        `columns` gives inputs that harm nothing. Each step runs once before, which compiles its kernels.
        """
        gc.collect()
        gc.disable()  # what it frees while a capture runs would end that capture
        try:
            for done, key in enumerate(sorted(self._wanted, key=lambda key: (key.rows, key.tokens), reverse=True)):
                report(done, len(self._wanted))
                self._captured[key] = self._capture(key, columns(key), forward, sequel(key))
        finally:
            gc.enable()
        self.keys = tuple(self._wanted)

    def _capture(self, key: GraphKey, columns: StepColumns, forward: Forward, sequel: Sequel | None) -> Captured:
        inputs = StepInputs.at(self._place, key, self._tables)
        for target, column in zip(inputs, columns, strict=True):
            target.copy_(torch.from_numpy(column))
        outputs = forward(key, inputs)
        if sequel is not None:
            sequel(key, inputs, outputs)
        torch.cuda.synchronize()
        graph, following = torch.cuda.CUDAGraph(), None
        # torch.cuda.graph() would collect garbage and give all memory back before each: a tenth of a second
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool)
            outputs = forward(key, inputs)
            graph.capture_end()
            if sequel is not None:  # while the outputs are held, so that it takes no memory of theirs
                following = torch.cuda.CUDAGraph()
                following.capture_begin(self._pool)
                sequel(key, inputs, outputs)
                following.capture_end()
        size = offsets(columns)[1]
        return Captured(graph, self._place[:size], inputs, StepOutputs(*map(alias, outputs)), following)

    def replay(self, key: GraphKey, staged: Tensor) -> tuple[StepInputs, StepOutputs]:
        """staged: uint8, the inputs in their layout on the device. What it returns is valid until the next replay."""
        captured = self._captured[key]
        captured.place.copy_(staged, non_blocking=True)
        captured.graph.replay()
        return captured.inputs, captured.outputs

    def follow(self, key: GraphKey) -> bool:
        """Behind the newest replay, which was of this layout: its sequel. False: there is none."""
        sequel = self._captured[key].sequel
        if sequel is not None:
            sequel.replay()
        return sequel is not None
