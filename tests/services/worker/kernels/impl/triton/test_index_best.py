"""The Triton implementation of index_best against the op's meaning."""

from collections.abc import Callable

import pytest
import torch

from services.worker.kernels.impl.triton.index_best import IMPL, TURN, lanes_of
from services.worker.kernels.ops.index_best import index_best
from services.worker.kernels.ops.paged_attention import make_attention_rows
from tests.services.worker.kernels.impl.triton.hold import Holder, poisoned_allocations

TOP_K, COLUMNS = 20, 640
LANES = lanes_of(TOP_K)
POSITION = torch.arange(COLUMNS)
GROUP = (POSITION - POSITION // LANES * TURN.value) % LANES


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)


ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all are equal": lambda x: x * 0,
    "hardly more than zeros": lambda x: torch.where(x > 2.3, x, 0.0),
    "equals at the border": lambda x: x.round(),
    "the best are side by side": lambda x: x.sort(descending=True).values,
    "the best are the last": lambda x: x.sort().values,
    "all of a group are alike": lambda x: GROUP + x.sigmoid(),
    "what is repeated": lambda x: x[:8].repeat(len(x) // 8) + x * 1e-6,
    "side by side in bits": lambda x: (x.view(torch.int32) % 100 + 0x40000000).view(torch.float32),
    "around zero": lambda x: x * 10.0 ** -(x.abs() * 15),
    "nothing is finite": lambda x: torch.where(x > 0, torch.nan, -torch.inf),
    "less is finite than is chosen": lambda x: torch.where(POSITION % 50 == 7, x, -torch.inf),
}


@pytest.mark.parametrize("name", ROWS)
def test_hard_rows(name: str, device: torch.device) -> None:
    """Also such of which more is listed than fits into registers: the equal ones, and those alike by group."""
    x = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(5))
    scores = torch.stack([ROWS[name](x), ROWS[name](-x)])
    rows = make_attention_rows([1, 1], [COLUMNS, COLUMNS - 37], [list(range(40)), list(range(80, 40, -1))], 16)
    wanted = index_best.meaning(scores, rows, TOP_K)
    for tensor in ("context_lens", "block_tables"):
        object.__setattr__(rows, tensor, getattr(rows, tensor).to(device))
    with poisoned_allocations():
        assert torch.equal(IMPL.run(scores.to(device), rows, TOP_K).cpu(), wanted)
