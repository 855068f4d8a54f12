"""The Triton implementation of draw against the op's meaning."""

import torch

from services.worker.kernels.impl.triton._sampling import MANY_ROWS, tokens
from services.worker.kernels.impl.triton.draw import IMPL
from services.worker.kernels.ops.draw import draw
from tests.services.worker.kernels.impl.triton.hold import Holder, poisoned_allocations


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)


def test_odd_logits_give_ids_of_the_vocabulary(device: torch.device) -> None:
    """Rows of -inf, of NaN, with an infinity, and far ones."""
    size = 2500
    logits = torch.zeros(7, size)
    logits[0] = -torch.inf
    logits[1] = torch.nan
    logits[2, [9, 2000]] = torch.inf
    logits[3] = 3e38
    logits[4] = -3e38
    logits[5] = -torch.inf
    logits[5, 2499] = 1.0
    logits[6, 100] = torch.nan
    for temperature in (0.0, 1e-6, 0.7, 1e6):
        ones = torch.ones(7, device=device)
        numbers = torch.arange(7, device=device)
        with poisoned_allocations():
            got = IMPL.run(logits.to(device), ones * temperature, numbers, numbers).tolist()
        assert all(0 <= token < size for token in got), (temperature, got)
        assert got[2] == 9 and got[5] == 2499
        assert got[6] != 100


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """More rows than MANY_ROWS, whose programs take several chunks, against each alone."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(MANY_ROWS, 2100, generator=generator).to(device)
    temperature = torch.ones(MANY_ROWS, device=device)
    numbers = torch.arange(MANY_ROWS, device=device)
    together = IMPL.run(logits, temperature, numbers, numbers)
    for row in range(0, MANY_ROWS, 7):
        one = slice(row, row + 1)
        assert IMPL.run(logits[one], temperature[one], numbers[one], numbers[one]) == together[row]


def test_one_launch_gives_the_same_and_leaves_its_counter_at_zero(device: torch.device) -> None:
    logits, temperature, seeds, positions = (tensor.to(device) for tensor in draw.cases[2].make(torch.float32))
    counter = torch.zeros(len(logits), dtype=torch.int32, device=device)
    for _ in range(2):
        got = tokens(logits, temperature, None, seeds, positions, counter)
        assert torch.equal(got, IMPL.run(logits, temperature, seeds, positions))
        assert not counter.any()
