"""A step's rows in the places of a captured layout: what the host writes for its graph. Called by the runner.

`seat` writes all of it, once for each set of rows; `Seats.move` what goes with their positions, in each of their steps.
So the same rows' next step costs the host a few sums of columns, whatever the layout holds. Shapes: R rows, T tokens of
all rows, S rows that sample. All of it is index arithmetic of a plan: no value of the device is looked at. `Seating`
owns the inputs of each layout, and who sits in them since the step before.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from services.worker import graphs
from services.worker.block_tables import places_of
from services.worker.graphs import Choice, GraphKey, HostInputs, Tables
from services.worker.reports import reads_all
from services.worker.state import Ints, Rows, Step

Index = Ints | slice


class Seats(NamedTuple):
    """Where a step's rows and their tokens are in a graph's inputs. Good for any step with these `slots` (see Step)."""

    slots: Ints
    key: GraphKey
    inputs: HostInputs
    places: Ints  # [R], among the graph's rows
    drawn: Ints  # [S], of those that sample
    sampled: Ints  # [S], their slots
    token_slots: Ints  # [T]
    starts: Ints  # [2, T]: where the token's row begins in Rows.tokens, and 0
    ends: Ints  # [2, S]: where the row begins in Rows.tokens, and less its prompt
    ahead: Ints  # [T], tokens of its row before each
    # the same rows and tokens as indices, which are slices where the rows are all that the step has, in its order
    of_row: Index  # [T], a token's row
    sampling: Index  # [S], of the step's rows
    at_rows: Index
    at_drawn: Index
    at_tokens: Index  # [T], among the graph's tokens

    def move(self, step: Step, rows: Rows) -> None:
        """Writes the step's positions, and what follows from them."""
        columns, at = self.inputs.columns, self.at_tokens
        positions = step.positions[self.of_row] + self.ahead
        columns.tokens[:2, at] = self.starts + positions
        columns.tokens[2:, at] = places_of(rows.tables_of.pages, self.token_slots, positions, rows.block_tokens)
        context = step.positions + step.counts
        columns.context_lens[self.at_rows] = context
        columns.draw[0:3:2, self.at_drawn] = self.ends + context[self.sampling]


def seat(step: Step, rows: Rows, choice: Choice, inputs: HostInputs, scratch: Sequence[int]) -> Seats:
    """Fills `inputs` but for what `move` writes, the ring, and offsets and begins of rows with drafts.

    Places that the step leaves free read and write the padding row and the block `scratch` of each group.
    """
    size, chunks, row_len = choice.key.decode, choice.chunks, rows.tokens.shape[1]
    sampled = step.slots[step.samples]
    ends = np.stack((sampled * row_len, -rows.num_prompt[sampled]))
    index: tuple[Index, Index, Index, Index, Index]
    if len(chunks):
        places, begins = np.empty((2, len(step.slots)), np.int64)
        places[choice.decode] = begins[choice.decode] = np.arange(len(choice.decode))
        places[chunks] = np.arange(size, size + len(chunks))
        bounds = size + np.concatenate(([0], np.cumsum(step.counts[chunks])))
        begins[chunks] = bounds[:-1]
        of = np.repeat(np.arange(len(step.slots)), step.counts)
        ahead = np.arange(len(of)) - np.repeat(np.cumsum(step.counts) - step.counts, step.counts)
        drawn, token_slots = places[step.samples], step.slots[of]
        index = of, np.flatnonzero(step.samples), places, drawn, begins[of] + ahead
    else:  # rows that decode, in their order
        bounds, whole, every = np.array([size]), slice(len(step.slots)), slice(None)
        places = drawn = np.arange(len(step.slots))
        token_slots, ahead = step.slots, np.zeros_like(places)
        index = every, every, whole, whole, whole
    starts = np.stack((token_slots * row_len, np.zeros_like(token_slots)))
    where = places, drawn, sampled, token_slots
    seats = Seats(step.slots, choice.key, inputs, *where, starts, ends, ahead, *index)
    _write_layout(seats, rows, bounds)
    _write_padding(seats, rows, int(bounds[-1]), scratch)
    columns = inputs.columns
    for line, more in zip(columns.states, (more for more in rows.beside if more.is_state), strict=True):
        line[seats.places] = more.tables[step.slots, 0]
    columns.temperature[drawn] = rows.sampling["temperature"][sampled]
    columns.draw[1, drawn] = rows.sampling["seed"][sampled]
    return seats


def _write_layout(seats: Seats, rows: Rows, bounds: Ints) -> None:
    """Which tokens are whose. bounds: where the chunks' tokens begin, and end; they lie one behind the other."""
    columns, size, end = seats.inputs.columns, seats.key.decode, seats.key.tokens
    last, used = size + len(bounds) - 1, bounds[-1]
    columns.slots[:] = rows.padding_row
    columns.slots[seats.places] = seats.slots
    columns.token_rows[:] = rows.padding_row
    columns.token_rows[seats.at_tokens] = seats.token_slots
    columns.context_lens[:] = 1
    columns.query_starts[:size] = columns.draw[3, :size] = np.arange(size)
    columns.query_starts[size : last + 1] = bounds
    if seats.key.chunk:  # what is left is one chunk of the padding row
        columns.context_lens[-1] = max(end - used, 1)
        columns.query_starts[last + 1 :] = used
        columns.query_starts[-1] = end
        columns.draw[3, size:last] = bounds[1:] - 1
        columns.draw[3, last:] = end - 1


def _write_padding(seats: Seats, rows: Rows, used: int, scratch: Sequence[int]) -> None:
    """What free places read and write: tokens from `used` on, and rows that do not decode. `move` does the others'."""
    columns, places = seats.inputs.columns, rows.padding_row * rows.tokens.shape[1]
    tokens, groups = columns.tokens, (rows.first, *rows.beside)
    pages = [block for block, group in zip(scratch, groups, strict=True) if not group.is_state]
    states = [block for block, group in zip(scratch, groups, strict=True) if group.is_state]
    columns.offsets[:] = -1
    tokens[1] = 0
    tokens[1, used:] = np.arange(tokens.shape[1] - used)
    tokens[0] = places + tokens[1]
    tokens[2:] = tokens[1] % rows.block_tokens + np.array(pages)[:, None] * rows.block_tokens
    columns.states[:] = np.array(states, np.int64)[:, None]
    columns.draw[0] = places + 1
    columns.temperature[:] = 0.0


class Seated(NamedTuple):
    """A step's rows in a graph, and which of them want more than it does: places in the step."""

    seats: Seats
    bound: Ints  # under a grammar
    others: Ints  # drawn again
    plain: bool  # there are none, and nobody wants to know more


class Seating:
    def __init__(self, rows: Rows, scratch: Sequence[int]) -> None:
        """scratch: as in `seat`."""
        states = sum(more.is_state for more in rows.beside)
        self.tables = Tables(1 + len(rows.beside) - states, states)
        self._rows, self._scratch = rows, scratch
        self._inputs: dict[GraphKey, HostInputs] = {}
        self._kept: Seated | None = None

    def seat(self, step: Step, choice: Choice) -> Seats:
        inputs = self._inputs.get(choice.key)
        if inputs is None:
            inputs = self._inputs[choice.key] = HostInputs.blank(choice.key, self.tables)
        return seat(step, self._rows, choice, inputs, self._scratch)

    def seated(self, step: Step, keys: Sequence[GraphKey], bound_of: Callable[[Step], Ints]) -> Seated | None:
        """Where the step's rows sit; None: in no layout. Kept while the same rows decode.

        keys: the layouts that are captured; bound_of: gives the places of rows under a grammar.
        """
        if self._kept is not None and self._kept.seats.slots is step.slots:
            return self._kept
        self._kept, rows = None, self._rows
        choice = graphs.choose(step, keys) if not reads_all(step, rows) else None
        if choice is None:
            return None
        bound = bound_of(step)
        special = step.samples & ~rows.is_plain[step.slots]
        special[bound] = False
        others = np.flatnonzero(special)
        plain = not (len(bound) or len(others) or rows.reports or rows.drafts is not None)
        found = Seated(self.seat(step, choice), bound, others, plain)
        if not choice.key.chunk:  # chunks may come to a layout for more context, or to their prompt's end
            self._kept = found
        return found
