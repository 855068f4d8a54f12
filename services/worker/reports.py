"""Log-probabilities of one step's tokens, of the rows that want them. Owner: the runner, which calls in this order:
`start`, `wanted` while inputs are put, `drawn` or `prompt` when logits are there, `settled` when rows under a grammar
have their tokens, `taken` when all is launched. Beside them the vectors of prompts, which the `pooler` makes.

Logits are the model's own, which the sampler may overwrite: `Wanted.own` keeps those of the rows that are asked for.
A prompt's logits exist for a few positions at a time only. Nothing here waits for the device.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.logprobs import StepLogprobs
from services.worker.inputs import Put
from services.worker.kernels.ops.token_logprobs import token_logprobs
from services.worker.kernels.registry import Bindings
from services.worker.pooling import Pooler, Vectors, pools_means
from services.worker.state import Ints, Rows, Step

SLICE = 128  # positions of a prompt that have logits at once


class Named(NamedTuple):
    """Of the wanted entries those whose requests name the tokens beside each one, in place of the best ones."""

    rows: Tensor  # int64 [R]: which
    ids: Tensor  # int64 [R, M]; where a row names fewer, the last ones mean nothing


class Wanted(NamedTuple):
    """Of the entries (rows that sample, with drafts each of their tokens) some."""

    entries: Ints  # which
    tops: Ints
    where: Tensor  # int64: their places among the rows of the logits
    best: int  # the most that an entry wants of the most probable ones
    named: Named | None

    def own(self, logits: Tensor) -> Tensor:
        """A copy of their logits."""
        return logits.index_select(0, self.where)


class Waiting(NamedTuple):
    """What `drawn` was given, until the step's rows under a grammar have their tokens (held.py)."""

    wanted: Wanted
    own: Tensor
    tokens: Tensor
    held: Tensor


class PromptPart(NamedTuple):
    """Positions of a row whose next token is known and wants its log-probability."""

    row: int  # place in the plan
    first: int  # the first of these tokens in the prompt
    top: int
    inputs: Tensor  # int64: places of the positions among the step's tokens
    targets: Tensor  # int64: of their next tokens, flat in Rows.tokens


class Table(NamedTuple):
    """int32 [N, 1 + 2 * (1 + top)] in memory of the host, each line a record; there when the step is over."""

    lines: Tensor
    top: int


class StepReports(NamedTuple):
    """What `taken` gives, to be cut into records when the step is over."""

    drawn: Table | None
    entries: Ints
    tops: Ints
    prompts: list[tuple[int, int, Table]]  # row, first token, records
    vectors: list[Vectors]

    def read(self, kept: npt.NDArray[np.bool_] | None) -> StepLogprobs:
        """`kept`: entries whose tokens are the rows'; None: all are."""
        prompts = {row: (first, table.lines.numpy().tobytes()) for row, first, table in self.prompts}
        vectors = {
            row: line.tobytes() for rows, lines in self.vectors for row, line in zip(rows, lines.numpy(), strict=True)
        }
        if self.drawn is None:
            return StepLogprobs(b"", prompts, vectors)
        lines, tops, most = self.drawn.lines.numpy(), self.tops, self.drawn.top
        if kept is not None:
            lines, tops = lines[kept[self.entries]], tops[kept[self.entries]]
        if (tops == most).all():
            return StepLogprobs(lines.tobytes(), prompts, vectors)
        ids, values = lines[:, 1 : 2 + most], lines[:, 2 + most :]
        records = (
            lines[row, :1].tobytes() + ids[row, : 1 + top].tobytes() + values[row, : 1 + top].tobytes()
            for row, top in enumerate(tops.tolist())
        )
        return StepLogprobs(b"".join(records), prompts, vectors)


def scores_prompts(step: Step, rows: Rows) -> bool:
    """Whether the step computes a prompt's log-probabilities: then the hidden states of all its tokens are needed."""
    asking = [slot for slot, report in rows.reports.items() if report.prompt >= 0]
    if not asking:
        return False
    among = np.isin(step.slots, asking)
    return bool((step.positions[among] < rows.num_prompt[step.slots[among]] - 1).any())


def reads_all(step: Step, rows: Rows) -> bool:
    """Whether hidden states of all the step's tokens are needed, which no graph keeps."""
    return scores_prompts(step, rows) or pools_means(step, rows)


class Reporter:
    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self.pooler = Pooler()
        self._none = np.zeros(0, np.int64)
        self.start()

    def start(self) -> None:
        """A step begins, or begins again."""
        self.pooler.start()
        self._drawn: Table | None = None
        self._waiting: Waiting | None = None
        self._wanted = self._none, self._none
        self._prompts: list[tuple[int, int, Table]] = []
        self._any = False

    def wanted(self, slots: Ints, places: Ints, rows: Rows, put: Put) -> Wanted | None:
        """By entry: its slot, and its place among the logits' rows. None: no row wants anything."""
        if not rows.reports:
            return None
        tops = np.array([rows.reports[slot].top if slot in rows.reports else -1 for slot in slots.tolist()], np.int64)
        entries = np.flatnonzero(tops >= 0)
        if not len(entries):
            return None
        self._wanted, self._any = (entries, tops[entries]), True
        named = [rows.reports[slot].named for slot in slots[entries].tolist()]
        best = max((top for top, ids in zip(tops[entries].tolist(), named, strict=True) if not ids), default=0)
        return Wanted(*self._wanted, put(places[entries]), best, _named(named, put))

    def drawn(self, wanted: Wanted, own: Tensor, tokens: Tensor, held: Tensor | None = None) -> None:
        """own: [B, V] as it was before anything was done to it; tokens: int32, of all rows of the logits; held: int64,
        those whose tokens `settled` will bring."""
        if held is not None:
            self._waiting = Waiting(wanted, own, tokens, held)
            return
        top = int(wanted.tops.max())
        packed = self._packed(own, tokens.index_select(0, wanted.where), wanted.best, top, wanted.named)
        self._drawn = _to_host(packed, top)

    def settled(self, tokens: Tensor) -> None:
        """int32, of the rows that `held` has named."""
        if self._waiting is not None:
            wanted, own, others, held = self._waiting
            self.drawn(wanted, own, others.index_copy(0, held, tokens))

    def parts(self, step: Step, drafting: int, rows: Rows, put: Put) -> list[PromptPart]:
        """What a step computes of prompts that want log-probabilities. drafting: the plan's; `step`: spread out."""
        parts: list[PromptPart] = []
        if not scores_prompts(step, rows):
            return parts
        begins = np.cumsum(step.counts) - step.counts
        counts = np.minimum(step.counts, rows.num_prompt[step.slots] - 1 - step.positions)
        for j in range(step.drafting, len(step.slots)):
            slot, position = int(step.slots[j]), int(step.positions[j])
            report = rows.reports.get(slot)
            if report is None or report.prompt < 0 or counts[j] <= 0:
                continue
            ahead = np.arange(counts[j])
            targets = slot * rows.tokens.shape[1] + position + 1 + ahead
            place = j - step.drafting + drafting
            parts.append(PromptPart(place, position + 1, report.prompt, put(begins[j] + ahead), put(targets)))
        return parts

    def prompt(self, part: PromptPart, hidden: Tensor, logits: Callable[[Tensor], Tensor], tokens: Tensor) -> None:
        """hidden: of all the step's tokens; logits: of some of them; tokens: Rows.tokens."""
        wanted = tokens.view(-1).index_select(0, part.targets)
        slices = (slice(at, at + SLICE) for at in range(0, len(wanted), SLICE))
        found = [
            self._packed(logits(hidden.index_select(0, part.inputs[each])), wanted[each], part.top) for each in slices
        ]
        self._prompts.append((part.row, part.first, _to_host(torch.cat(found), part.top)))
        self._any = True

    def _packed(
        self, logits: Tensor, tokens: Tensor, best: int, top: int | None = None, named: Named | None = None
    ) -> Tensor:
        """Records of `top` tokens beside each one: the `best` most probable ones, or in some rows the named ones."""
        # asked for only now: an op of torch's that a start asks for keeps it from compiling by all cores
        values, ids, ranks = self._bindings(token_logprobs)(logits, tokens, best)
        if top is not None and top > best:
            values, ids = (torch.nn.functional.pad(each, (0, top - best)) for each in (values, ids))
        if named is not None:
            logits, beside = logits.index_select(0, named.rows).float(), slice(1, 1 + named.ids.shape[1])
            values[named.rows, beside] = logits.gather(1, named.ids) - logits.logsumexp(-1, keepdim=True)
            ids[named.rows, beside] = named.ids.to(torch.int32)
        return torch.cat((ranks[:, None], ids, values.view(torch.int32)), -1)

    def taken(self) -> StepReports | None:
        """Of this step; None: nobody wants any."""
        vectors = self.pooler.taken()
        return StepReports(self._drawn, *self._wanted, self._prompts, vectors) if self._any or vectors else None


def _named(named: list[tuple[int, ...]], put: Put) -> Named | None:
    """By wanted entry."""
    rows = np.flatnonzero([bool(ids) for ids in named])
    if not len(rows):
        return None
    ids = np.zeros((len(rows), max(map(len, named))), np.int64)
    for line, row in zip(ids, rows.tolist(), strict=True):
        line[: len(named[row])] = named[row]
    return Named(put(rows), put(ids))


def _to_host(packed: Tensor, top: int) -> Table:
    """Starts the copy."""
    if packed.device.type == "cpu":
        return Table(packed, top)
    lines = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
    return Table(lines.copy_(packed, non_blocking=True), top)
