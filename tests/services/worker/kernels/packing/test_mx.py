import pytest
import torch

from services.worker.kernels.packing.mx import (
    VALUES,
    decode_mxfp4,
    decode_mxfp8,
    decode_scales,
    encode_mxfp4,
    encode_mxfp8,
    tile_scales,
    untile_scales,
)


def test_scales_are_powers_of_two() -> None:
    exponents = torch.arange(255).to(torch.uint8)
    wanted = torch.tensor([2.0 ** (e - 127) for e in range(255)], dtype=torch.float64)
    assert torch.equal(decode_scales(exponents).double(), wanted)
    assert decode_scales(torch.tensor([255], dtype=torch.uint8)).isinf().all()


def test_every_number_comes_back() -> None:
    row = torch.tensor([*VALUES, *(-value for value in VALUES)] * 2)
    for power in (-20, 0, 13):
        packed, scales = encode_mxfp4(row[None] * 2.0**power)
        assert packed.shape == (1, 16) and scales.tolist() == [[127 + power]]
        assert torch.equal(decode_mxfp4(packed, scales), row[None] * 2.0**power)
    assert encode_mxfp4(row[None])[0][0, 0].item() == 0x10, "the lower half byte is the first number"


def test_the_scale_is_the_least_under_which_all_fit() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, 64)[:, None]
    _, scales = encode_mxfp4(x)
    largest = x.unflatten(-1, (-1, 32)).abs().amax(-1)
    assert (largest <= 6 * decode_scales(scales)).all()
    assert (largest > 6 * decode_scales(scales - 1)).all()


def test_rounds_to_nearest_and_ties_to_even() -> None:
    row = torch.zeros(32)
    row[:12] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, -2.5, 0.2501, -0.75])
    wanted = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -2.0, 0.5, -1.0]
    assert decode_mxfp4(*encode_mxfp4(row[None]))[0, :12].tolist() == wanted


def test_zeros_stay_zero() -> None:
    assert not decode_mxfp4(*encode_mxfp4(torch.zeros(3, 64))).any()


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (32, 8), (300, 12), (256, 72), (0, 8)])
def test_scale_tiles_there_and_back(rows: int, columns: int) -> None:
    scales = (torch.arange(rows * columns) % 255 + 1).view(rows, columns).to(torch.uint8)
    tiles = tile_scales(scales)
    assert tiles.shape == (-(-rows // 256) * 8, -(-columns // 8), 4, 16, 2, 2)
    assert torch.equal(untile_scales(tiles, rows, columns), scales)
    assert int((tiles != 0).sum()) == rows * columns, "padding is 0"


def test_memory_of_a_scale_tile() -> None:
    """Rows r and r + 16 beside each other, of scales g and g + 4; then the next row; then the next scale."""
    scales = (torch.arange(256)[:, None] // 2 + 10 * torch.arange(8)).to(torch.uint8)
    memory = tile_scales(scales).view(-1)
    assert memory[:4].tolist() == [scales[0, 0], scales[16, 0], scales[0, 4], scales[16, 4]]
    assert memory[8:10].tolist() == [scales[2, 0], scales[18, 0]]
    assert memory[64].item() == scales[0, 1].item() and memory[256].item() == scales[32, 0].item()


def test_fp8_groups_share_the_least_power_of_two() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, 64)[:, None]
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        numbers, scales = encode_mxfp8(x, dtype)
        largest, limit = x.unflatten(-1, (-1, 32)).abs().amax(-1), torch.finfo(dtype).max
        assert (largest <= limit * decode_scales(scales)).all()
        assert (largest > limit * decode_scales(scales - 1)).all()
        wide = decode_mxfp8(numbers, scales)
        assert torch.equal(decode_mxfp8(*encode_mxfp8(wide, dtype)), wide), "what fits once fits again"
