"""What the sampling kernels share: the random numbers, sums that are a row's own, the form with one launch."""

import torch
import triton
import triton.language as tl

from services.worker.kernels.impl.triton import _sampling
from services.worker.kernels.impl.triton._sampling import MANY_ROWS, tokens
from services.worker.kernels.ops.draw import draw
from services.worker.kernels.ops.sample import uniform


@triton.jit
def numbers_of(seeds_ptr, positions_ptr, out_ptr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, COUNT)
    number = _sampling.uniform(tl.load(seeds_ptr + index), tl.load(positions_ptr + index))
    tl.store(out_ptr + index, number)


def test_numbers_are_the_ops(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    seeds[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    positions = torch.randint(0, 2**31, (64,), generator=generator)
    got = torch.empty(64, dtype=torch.float64, device=device)
    numbers_of[(1,)](seeds.to(device), positions.to(device), got, 64)
    assert torch.equal(got.cpu(), uniform(seeds, positions))


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """More rows than MANY_ROWS, whose programs take several chunks, against each alone."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(MANY_ROWS, 2100, generator=generator).to(device)
    temperature = torch.ones(MANY_ROWS, device=device)
    numbers = torch.arange(MANY_ROWS, device=device)
    together = tokens(logits, temperature, None, numbers, numbers)
    for row in range(0, MANY_ROWS, 7):
        one = slice(row, row + 1)
        assert tokens(logits[one], temperature[one], None, numbers[one], numbers[one]) == together[row]


def test_one_launch_gives_the_same_and_leaves_its_counter_at_zero(device: torch.device) -> None:
    logits, temperature, seeds, positions = (tensor.to(device) for tensor in draw.cases[2].make(torch.float32))
    counter = torch.zeros(len(logits), dtype=torch.int32, device=device)
    for _ in range(2):
        got = tokens(logits, temperature, None, seeds, positions, counter)
        assert torch.equal(got, tokens(logits, temperature, None, seeds, positions))
        assert not counter.any()
