import numpy as np
import pytest

from common.protocol import Sampling
from services.worker.graphs import Choice, GraphKey, HostInputs, choose
from services.worker.seats import Seats, seat
from services.worker.state import Rows, Step
from tests.services.worker.test_inputs import GREEDY, prepare


def seated(step: Step, rows: Rows, choice: Choice) -> Seats:
    inputs = HostInputs.blank(choice.key)
    for column in inputs.columns:
        column += 7  # what an earlier step left
    seats = seat(step, rows, choice, inputs, scratch=[99])
    seats.move(step, rows)
    return seats


def test_free_places_of_a_graph_harm_nobody() -> None:
    samplings = [Sampling(8, seed=5, temperature=0.5), GREEDY]
    rows, step = prepare(samplings, [6, 3], [(1, 2, 1, 1), (0, 5, 1, 1)])
    choice = choose(step, [GraphKey(4)])
    assert choice is not None
    seats = seated(step, rows, choice)
    columns, places = seats.inputs.columns, seats.places
    tokens, draw, token_rows, slots, context, starts, temperature, *_ = columns
    offsets = columns.offsets
    assert (offsets == -1).all()
    row_len, padding = rows.tokens.shape[1], rows.padding_row
    assert places.tolist() == [0, 1]
    assert tokens[0].tolist() == [row_len + 2, 5, padding * row_len, padding * row_len]
    assert tokens[1].tolist() == [2, 5, 0, 0]
    assert tokens[2].tolist() == [42, 5, 396, 396]
    assert draw[0].tolist() == [row_len + 3, 6, padding * row_len + 1, padding * row_len + 1]
    assert draw[1:3, :2].tolist() == [[0, 5], [1, 4]]
    assert slots.tolist() == token_rows.tolist() == [1, 0, padding, padding] and context.tolist() == [3, 6, 1, 1]
    assert starts.tolist() == [0, 1, 2, 3, 4] and temperature.tolist() == [0.0, 0.5, 0.0, 0.0]


def test_chunks_lie_behind_the_rows_that_decode() -> None:
    rows, step = prepare([GREEDY] * 3, [9, 7, 30], [(2, 4, 26, 1), (1, 6, 1, 1), (0, 0, 5, 0)])
    key = GraphKey(2, 128)
    choice = choose(step, [key])
    assert choice is not None
    seats = seated(step, rows, choice)
    columns, places = seats.inputs.columns, seats.places
    tokens, draw, token_rows, slots, context, starts, *_ = columns
    padding, row_len = rows.padding_row, rows.tokens.shape[1]
    assert places.tolist() == [2, 0, 3]
    assert slots.tolist() == [1, padding, 2, 0, padding, padding, padding][: key.rows]
    assert context.tolist() == [7, 1, 30, 5, *[1] * (key.rows - 5), 128 - 31]
    assert starts.tolist() == [0, 1, 2, 28, 33, *[33] * (key.rows - 5), 130]
    assert tokens[1, :2].tolist() == [6, 0] and tokens[1, 2:28].tolist() == list(range(4, 30))
    assert tokens[1, 28:34].tolist() == [0, 1, 2, 3, 4, 0]
    assert token_rows[2:34].tolist() == [2] * 26 + [0] * 5 + [padding]
    assert tokens[2, 2] == rows.tables[2, 1] * 4 and tokens[2, 33] == 99 * 4
    assert draw[3, :4].tolist() == [0, 1, 27, 32]
    assert draw[0, :4].tolist() == [row_len + 7, padding * row_len + 1, 2 * row_len + 30, padding * row_len + 1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_moved_rows_lie_as_if_seated_anew(temperature: float) -> None:
    """In every step of the same rows, into blocks that they get meanwhile too."""
    rows, step = prepare([Sampling(8, seed=3, temperature=temperature), GREEDY], [6, 3], [(1, 2, 1, 1), (0, 5, 1, 1)])
    choice = choose(step, [GraphKey(4)])
    assert choice is not None
    seats = seated(step, rows, choice)
    rows.tables[:, 2:4] = [[90, 91]] * len(rows.tables)
    for ahead in range(1, 8):
        later = step._replace(positions=step.positions + ahead)
        seats.move(later, rows)
        assert np.array_equal(seats.inputs.buffer, seated(later, rows, choice).inputs.buffer)
