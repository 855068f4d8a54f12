"""The table of rows against an obvious model that keeps a number per row and looks at every row in every step."""

from random import Random

import numpy as np
import pytest

from common.columns import unpack_i32
from common.protocol import Sampling, make_seq_id
from services.scheduler.request import Request, Row, Sequence
from services.scheduler.rows import Roster, RowTable
from services.scheduler.tenants import Tenant

BLOCK = 4


def row_with(slot: int, prompt: list[int], limit: int) -> Row:
    column = np.array(prompt, np.int32).tobytes()
    request = Request(column, len(prompt), b"")
    seq_id = make_seq_id(0, slot % 3, 1, slot)
    sequence = Sequence(seq_id, request, Sampling(max_tokens=99), (0, slot), limit, bytearray(column), Tenant("", 1))
    return Row(sequence, slot, [], len(prompt), 0)


def test_positions_indices_and_ids_are_columns_by_slot() -> None:
    table = RowTable(4, BLOCK, 2)
    for slot in (2, 0):
        row = row_with(slot, [1] * (slot + 3), 40)
        table.open(row)
        table.join(row)
    roster = table.roster()
    assert roster.size == 2
    assert list(unpack_i32(roster.slots_column)) == [0, 2]
    table.advance()
    assert (roster.positions + 1 - roster.tick).tolist() == [3, 5]
    assert (roster.indices + 1 - roster.tick).tolist() == [1, 1]
    assert roster.tokenizers is not None and roster.tokenizers.tolist() == [0, 2]
    assert table.roster() is roster, "nothing changed, nothing is built"


def test_a_taken_slot_cannot_be_opened() -> None:
    table = RowTable(2, BLOCK, 2)
    table.open(row_with(0, [1], 9))
    with pytest.raises(AssertionError, match="slot 0 is taken"):
        table.open(row_with(0, [1], 9))


def test_results_of_rows_that_have_gone_are_dropped() -> None:
    table = RowTable(2, BLOCK, 2)
    old, other = row_with(0, [1], 30), row_with(1, [1], 30)
    for row in (old, other):
        table.open(row)
        table.join(row)
    roster = table.roster()
    assert table.living(roster) is None
    table.advance()
    table.close(old)
    new = row_with(0, [9], 30)
    table.open(new)
    living = table.living(roster)
    assert living is not None and living.tolist() == [1]
    table.receive(roster, np.array([70, 71], np.uint32), living, 1)
    table.flush(other)
    table.flush(new)
    assert list(unpack_i32(bytes(other.sequence.tokens))) == [1, 71]
    assert list(unpack_i32(bytes(new.sequence.tokens))) == [9]


class Model:
    """One dictionary of plain counts per row."""

    def __init__(self) -> None:
        self.scheduled: dict[Row, int] = {}
        self.expected: dict[Row, list[int]] = {}


def plan(table: RowTable, model: Model) -> tuple[int, Roster, list[Row], list[Row]]:
    """A decode step in both; returns its tick, roster, rows and the rows that end in it."""
    entering = {row for row, scheduled in model.scheduled.items() if scheduled % BLOCK == 0}
    assert set(table.entering_block()) == entering
    roster = table.roster()
    rows = sorted(model.scheduled, key=lambda row: row.slot)
    assert roster.slots.tolist() == [row.slot for row in rows]
    ending = table.advance()
    positions = (roster.positions + (table.tick - roster.tick)).tolist()
    assert positions == [model.scheduled[row] for row in rows]
    for row in rows:
        model.scheduled[row] += 1
    assert set(ending) == {row for row in rows if model.scheduled[row] == row.sequence.limit - 1}
    for row in ending:
        del model.scheduled[row]
    return table.tick, roster, rows, ending


@pytest.mark.parametrize("seed", range(30))
def test_the_fast_path_equals_the_obvious_model(seed: int) -> None:
    random = Random(seed)
    plans_in_flight = random.randint(1, 3)
    table, model = RowTable(12, BLOCK, plans_in_flight), Model()
    flights: list[tuple[int, Roster, list[Row], list[Row]]] = []
    alive: set[Row] = set()
    for number in range(200):
        free = [slot for slot in range(12) if table.by_slot[slot] is None]
        if free and random.random() < 0.4:
            prompt = [random.randrange(99) for _ in range(random.randint(1, 9))]
            row = row_with(random.choice(free), prompt, len(prompt) + random.randint(3, 20))
            table.open(row)
            table.join(row)
            alive.add(row)
            model.scheduled[row] = len(prompt)
            # The token before the first step came with the prompt's own result.
            row.sequence.tokens += number.to_bytes(4, "little")
            model.expected[row] = [*prompt, number]
        if alive and random.random() < 0.15:
            gone = random.choice(sorted(alive, key=lambda row: row.epoch))
            table.flush(gone)
            assert list(unpack_i32(bytes(gone.sequence.tokens))) == model.expected[gone]
            table.close(gone)
            alive.remove(gone)
            model.scheduled.pop(gone, None)
        if model.scheduled and len(flights) < plans_in_flight:
            flights.append(plan(table, model))
        if flights and random.random() < 0.7:
            receive(table, model, flights.pop(0), alive, random)
        table.check(alive, set(model.scheduled))
        for row in model.scheduled:
            assert table.scheduled(row) == model.scheduled[row]


def receive(
    table: RowTable, model: Model, flight: tuple[int, Roster, list[Row], list[Row]], alive: set[Row], random: Random
) -> None:
    tick, roster, rows, ending = flight
    tokens = [random.randrange(99) for _ in rows]
    living = table.living(roster)
    places = range(len(rows)) if living is None else living.tolist()
    assert [rows[place] for place in places] == [row for row in rows if row in alive]
    table.receive(roster, np.array(tokens, np.uint32), living, tick)
    for row, token in zip(rows, tokens, strict=True):
        if row in alive:
            model.expected[row].append(token)
    for row in table.flush_filled_blocks(tick):
        assert len(model.expected[row]) % BLOCK == 1
        assert list(unpack_i32(bytes(row.sequence.tokens))) == model.expected[row]
    for row in ending:
        if row in alive:
            table.flush(row)
            assert list(unpack_i32(bytes(row.sequence.tokens))) == model.expected[row]
            table.close(row)
            alive.remove(row)
