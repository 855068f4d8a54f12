"""Borders by counting: what they know is right, and they know it for logits such as models give."""

import pytest
import torch

from services.worker.kernels.impl.triton._launch import options
from services.worker.kernels.impl.triton._sampling import run_stats
from services.worker.kernels.impl.triton._value_counts import borders
from services.worker.kernels.ops.keep_floor import keep_floor, make_floor_case


def counted(logits: torch.Tensor, *limits: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(logits), device=logits.device)
    stats, sums = run_stats(logits, limits[0], options(logits.device))
    temperature, top_k, top_p, min_p = limits
    borders(logits, (temperature, top_k, top_p, min_p), stats, sums, out)
    return out


@pytest.mark.parametrize("rows", [1, 9])
def test_borders_of_peaked_rows_are_known_and_right(device: torch.device, rows: int) -> None:
    """All kinds of limits, with equal logits at the borders and tokens that are barred."""
    logits, *limits, _ = make_floor_case(rows, 9000, 50).make(torch.bfloat16)
    logits = logits.to(torch.bfloat16).clone()
    logits[:, 100:300] = logits[:, :1]
    logits[:, 40] = -torch.inf
    moved = [part.to(device) for part in (logits, *limits)]
    got = counted(*moved)
    wanted = keep_floor.meaning(logits, *limits, int(limits[1].max()))
    torch.testing.assert_close(got.cpu(), wanted)


def test_what_lies_below_the_counted_values_is_said_to_be_unknown(device: torch.device) -> None:
    """Even logits around zero: half the mass is further from the maximum than the counts reach."""
    logits = torch.linspace(-1.0, 1.0, 4000).to(torch.bfloat16)[None].repeat(3, 1)
    logits[2, 100:] = -torch.inf  # fewer finite ones than the rank
    ones = torch.ones(3)
    limits = ones, torch.tensor([0, 9, 900]), torch.tensor([0.99, 0.99, 1.0]), torch.zeros(3)
    got = counted(*(part.to(device) for part in (logits, *limits))).cpu()
    wanted = keep_floor.meaning(logits, *limits, 900)
    assert got[0].isnan() and got[2].isnan()
    torch.testing.assert_close(got[1], wanted[1])


def test_rows_without_a_maximum_have_no_floor(device: torch.device) -> None:
    logits = torch.full((2, 64), -torch.inf, dtype=torch.bfloat16, device=device)
    limits = torch.ones(2), torch.tensor([3, 3]), torch.full((2,), 0.5), torch.zeros(2)
    assert counted(logits, *(part.to(device) for part in limits)).tolist() == [-torch.inf] * 2
