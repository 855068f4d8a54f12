"""From a step's rows to the frozen batch that the model and the sampler take. Pure; called by the runner.

Shapes: R rows, T tokens of all rows, S rows that sample, D of them that draw (the others are greedy), M blocks of the
longest row. All index arithmetic is on the host with numpy: a plan decides it, no device value does.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.state import Ints, Rows, Step


@dataclass(frozen=True)
class TopK:
    """Rows (of D) with a top_k."""

    index: Tensor  # int64
    top_k: Tensor  # int64
    top_p: Tensor  # float32
    max_k: int


@dataclass(frozen=True)
class TopP:
    """Rows (of D) with a top_p and no top_k."""

    index: Tensor  # int64
    top_p: Tensor  # float32


@dataclass(frozen=True)
class Draw:
    """Rows that draw a random token."""

    index: Tensor | None  # int64 [D], of S; None: all
    temperature: Tensor  # float32 [D]
    seeds: Tensor  # int64 [D]
    positions: Tensor  # int64 [D], output index
    min_p: Tensor | None  # float32 [D]
    top_k: TopK | None
    top_p: TopP | None


@dataclass(frozen=True)
class Penalties:
    """Rows (of S) with a penalty."""

    index: Tensor  # int64
    slots: Tensor  # int64
    presence: Tensor  # float32
    frequency: Tensor  # float32
    repetition: Tensor  # float32


@dataclass(frozen=True)
class LogitEdits:
    """Values to add to single logits: logit_bias, and -inf for ends before min_tokens."""

    index: Tensor  # int64, row (of S) * V + token
    values: Tensor  # float32


@dataclass(frozen=True)
class SamplingBatch:
    """What is not plain greedy in this step; each part is None where no row needs it."""

    draw: Draw | None
    penalties: Penalties | None
    edits: LogitEdits | None


@dataclass(frozen=True)
class ForwardBatch:
    token_places: Tensor  # int64 [T], flat in Rows.tokens
    positions: Tensor  # int64 [T]
    kv_slots: Tensor  # int64 [T], block * block_tokens + offset
    rows: AttentionRows
    outputs: Tensor | None  # int64 [S], of T; None: every token is sampled from
    sampled_places: Tensor  # int64 [S], flat in Rows.tokens
    sampling: SamplingBatch | None  # None: all greedy


def upload(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A new tensor on the device. Staging is made per step: an earlier copy may still be reading the last one."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def build(step: Step, rows: Rows) -> ForwardBatch:
    """The batch of a step that `Rows.apply` has checked; at least one row."""
    device = rows.tokens.device
    slots, counts = step.slots, step.counts
    context = step.positions + counts
    max_query = int(counts.max())
    ends = np.cumsum(counts)
    if max_query == 1:
        token_slots, positions = slots, step.positions
    else:
        token_slots = np.repeat(slots, counts)
        positions = np.arange(ends[-1]) + np.repeat(step.positions - (ends - counts), counts)
    block, offset = np.divmod(positions, rows.block_tokens)
    width = -(-int(context.max()) // rows.block_tokens)
    row_len = rows.tokens.shape[1]
    samples = step.samples
    everything = max_query == 1 and bool(samples.all())
    return ForwardBatch(
        token_places=upload(token_slots * row_len + positions, device),
        positions=upload(positions, device),
        kv_slots=upload(rows.tables[token_slots, block] * np.int64(rows.block_tokens) + offset, device),
        rows=AttentionRows(
            query_starts=upload(np.concatenate(([0], ends)).astype(np.int32), device),
            context_lens=upload(context.astype(np.int32), device),
            block_tables=upload(rows.tables[slots, :width], device),
            block_tokens=rows.block_tokens,
            max_query=max_query,
            max_context=int(context.max()),
        ),
        outputs=None if everything else upload(ends[samples] - 1, device),
        sampled_places=upload(slots[samples] * row_len + context[samples], device),
        sampling=_sampling(slots[samples], context[samples], rows),
    )


def _sampling(slots: Ints, context: Ints, rows: Rows) -> SamplingBatch | None:
    """context: each row's tokens before the one that is sampled."""
    columns = rows.sampling[slots]
    drawing = np.flatnonzero(columns["temperature"] > 0)
    output_index = context - rows.num_prompt[slots]
    draw = _draw(columns, drawing, output_index, rows.tokens.device) if len(drawing) else None
    edits = _edits(slots, output_index, rows) if rows.edits else None
    penalties = _penalties(columns, slots, rows.tokens.device) if rows.penalties is not None else None
    if draw is None and edits is None and penalties is None:
        return None
    return SamplingBatch(draw, penalties, edits)


def _draw(columns: npt.NDArray[np.void], drawing: Ints, output_index: Ints, device: torch.device) -> Draw:
    whole = len(drawing) == len(columns)
    columns, output_index = columns[drawing], output_index[drawing]
    top_k, top_p, min_p = columns["top_k"], columns["top_p"], columns["min_p"]
    by_rank, by_mass = np.flatnonzero(top_k), np.flatnonzero((top_k == 0) & (top_p < 1))

    def column(values: npt.NDArray[np.generic]) -> Tensor:
        return upload(np.ascontiguousarray(values), device)

    return Draw(
        index=None if whole else column(drawing),
        temperature=column(columns["temperature"]),
        seeds=column(columns["seed"]),
        positions=column(output_index),
        min_p=column(min_p) if bool(min_p.any()) else None,
        top_k=TopK(column(by_rank), column(top_k[by_rank]), column(top_p[by_rank]), int(top_k.max()))
        if len(by_rank)
        else None,
        top_p=TopP(column(by_mass), column(top_p[by_mass])) if len(by_mass) else None,
    )


def _penalties(columns: npt.NDArray[np.void], slots: Ints, device: torch.device) -> Penalties | None:
    index = np.flatnonzero((columns["presence"] != 0) | (columns["frequency"] != 0) | (columns["repetition"] != 1))
    if not len(index):
        return None
    columns = columns[index]
    names = ("presence", "frequency", "repetition")
    presence, frequency, repetition = (upload(np.ascontiguousarray(columns[name]), device) for name in names)
    return Penalties(upload(index, device), upload(slots[index], device), presence, frequency, repetition)


def _edits(slots: Ints, output_index: Ints, rows: Rows) -> LogitEdits | None:
    index, values = [], []
    for j, slot in enumerate(slots.tolist()):
        edits = rows.edits.get(slot)
        if edits is None:
            continue
        index.append(edits.bias_ids + j * rows.vocab_size)
        values.append(edits.bias_values)
        if output_index[j] < rows.sampling["min_tokens"][slot]:
            index.append(edits.end_ids + j * rows.vocab_size)
            values.append(np.full(len(edits.end_ids), -np.inf, np.float32))
    flat = np.concatenate(index) if index else np.zeros(0, np.int64)
    if not len(flat):
        return None
    device = rows.tokens.device
    return LogitEdits(upload(flat, device), upload(np.concatenate(values), device))
