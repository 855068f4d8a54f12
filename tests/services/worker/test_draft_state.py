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
