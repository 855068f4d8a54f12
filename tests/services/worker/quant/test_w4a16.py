from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.kernels.packing.int4 import pack_int4
from services.worker.quant.coded import Codes, Making, reordered
from services.worker.quant.coded_linears import BlockLinears
from services.worker.quant.w4a16 import FORMAT, in_order
from tests.services.worker.quant.loading import BINDINGS, as_if_by

MAKING = Making(torch.float32, torch.device("cpu"), BINDINGS)


@pytest.mark.parametrize("storage", ["Q4_0", "Q4_1", "Q4_K"])
def test_ggufs_blocks_as_they_are(storage: str, make_stored: Callable[..., Any]) -> None:
    """But for scales of K types and offsets, which are rounded to fp16."""
    parts = [make_stored(storage, 48, 256), make_stored(storage, 16, 256)]
    form = BlockLinears(FORMAT, MAKING)
    assert form.refuses(parts) is None and form.refuses([make_stored("Q8_0", 16, 64)]) is not None
    weight = form.make(parts)
    wide = torch.cat([part.dense(torch.float32) for part in parts])
    assert float((weight.dequantize() - wide).norm() / wide.norm()) < (1e-6 if storage == "Q4_0" else 1e-3)
    x = torch.randn(3, 256)
    torch.testing.assert_close(weight.linear(x), x @ weight.dequantize().T, rtol=1e-5, atol=1e-4)


def test_blocks_without_a_scale_are_their_offset() -> None:
    block = torch.zeros(1, 20, dtype=torch.uint8)
    block[0, 2:4] = torch.tensor([0.5]).half().view(torch.uint8)
    block[0, 4:] = 0x73
    assert FORMAT.decode(FORMAT.read_blocks("Q4_1", block)).unique().tolist() == [0.5]


def test_an_offset_far_away_is_kept_wide() -> None:
    block = torch.zeros(1, 20, dtype=torch.uint8)
    block[0, :4] = torch.tensor([1e-4, 50.0]).half().view(torch.uint8)
    codes = FORMAT.read_blocks("Q4_1", block)
    assert codes.zeros is not None and codes.zeros.dtype == torch.float32
    assert FORMAT.decode(codes).unique().tolist() == pytest.approx([50.0], rel=1e-3)


def ordered(columns: int, group: int) -> tuple[Codes, torch.Tensor]:
    """Act-order codes, and the matrix that they mean for x as it comes."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (8, columns), generator=generator).to(torch.uint8)
    table = (torch.arange(columns) // group)[torch.randperm(columns, generator=generator)]
    scales = torch.rand(8, columns // group, generator=generator) + 0.5
    wide = (numbers.float() - 8) * scales[:, table]
    return in_order(Codes(pack_int4(numbers), scales), numbers, table.int()), wide


def test_columns_out_of_order() -> None:
    codes, wide = ordered(128, 32)
    assert codes.order is not None
    torch.testing.assert_close(reordered(FORMAT.decode(codes), codes.order, 128), wide)
    x = torch.randn(3, 128)
    torch.testing.assert_close(FORMAT.weight(codes, 128, None, MAKING).linear(x), x @ wide.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("begin", "end"), [(0, 40), (31, 97), (127, 128)])
def test_a_share_of_columns_out_of_order(begin: int, end: int) -> None:
    codes, wide = ordered(128, 64)
    part = FORMAT.columns(codes, begin, end)
    assert part.order is not None and part.scales.shape[1] * 32 == len(part.order)
    weight, x = FORMAT.weight(part, end - begin, None, MAKING), torch.randn(3, end - begin)
    assert (weight.out_features, weight.in_features) == (8, end - begin)
    torch.testing.assert_close(weight.dequantize(), wide[:, begin:end])
    torch.testing.assert_close(weight.linear(x), x @ wide[:, begin:end].T, rtol=1e-5, atol=1e-4)


def test_zero_points_in_the_middle_join_others() -> None:
    plain, other = FORMAT.encode(torch.randn(4, 64)), FORMAT.encode(torch.rand(4, 64))
    middle = plain._replace(zeros=None)
    joined = FORMAT.join([middle, other])
    assert joined is not None
    torch.testing.assert_close(FORMAT.decode(joined), torch.cat([FORMAT.decode(middle), FORMAT.decode(other)]))
    shuffled = other._replace(order=torch.arange(64))
    assert FORMAT.join([other, shuffled]) is None, "they multiply x in unlike orders"


def test_groups_of_zeros_stay_zero() -> None:
    assert not FORMAT.decode(FORMAT.encode(torch.zeros(2, 32))).any()


@pytest.mark.parametrize("zero", [9, 16])
def test_experts_by_a_provider_whose_zero_points_are_of_four_bits(zero: int) -> None:
    """GPTQ's may be 16: those stay with the op that takes any."""
    up, down = (
        Codes(*map(torch.stack, zip(*(FORMAT.encode(torch.randn(64, columns))[:3] for _ in range(3)), strict=True)))
        for columns in (64, 32)
    )
    assert up.zeros is not None and up.zeros.dtype == torch.uint8
    up.zeros[2, 5, 0] = zero
    routing = torch.ones(4, 1), torch.tensor([[0], [2], [1], [2]], dtype=torch.int32)
    results, stacks = [], []
    for bindings in (BINDINGS, as_if_by("aiter", "moe_int4_whole")):
        experts = FORMAT.experts(up, down, None, MAKING._replace(bindings=bindings))
        residual = torch.zeros(4, 64)
        experts.add_to(residual, torch.ones(4, 64), *routing)
        results.append(residual)
        stacks.append(experts.stacks[2])
    assert results[0].abs().max() > 0.1 and torch.equal(*results)
    assert [z.shape[1] for z in stacks] == [64, 32 if zero == 9 else 64]
