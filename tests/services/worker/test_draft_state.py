import torch

from services.worker.draft_state import DraftState
from services.worker.memory import Shape
from services.worker.state import Rows


def test_drafts_have_room_behind_the_longest_row() -> None:
    cpu = torch.device("cpu")
    rows = Rows(Shape(3, 32, 8), 100, (2,), cpu, drafts=DraftState(3, 5, cpu))
    assert rows.max_len == 32 and rows.tokens.shape == (4, 32 + 1 + 5)
    assert rows.drafts is not None and len(rows.drafts.lengths) == len(rows.drafts.drafted) == len(rows.tokens)
    assert not rows.drafts.adrift.any()


def test_a_row_that_takes_a_slot_has_nothing_of_the_one_before() -> None:
    """On a GPU the host knows of a row that drafted only where it stands at most."""
    state = DraftState(3, 2, torch.device("cpu"))
    state.held[:], state.lengths[:], state.adrift[:] = 2, 9, True
    state.start([2, 0], [5, 7])
    assert state.held.tolist() == [0, 2, 0, 2] and state.lengths.tolist() == [7, 9, 5, 9]
    assert state.adrift.tolist() == [False, True, False]
