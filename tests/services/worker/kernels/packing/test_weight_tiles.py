import pytest
import torch

from services.worker.kernels.packing.weight_tiles import (
    as_matrix,
    fits_tiles,
    matrix_shape,
    plain,
    tile_weight,
    untile_weight,
)

DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back(dtype: torch.dtype, rows: int) -> None:
    for shape in ((32, 32), (96, 160), (3, 64, 96), (2, 2, 32, 64)):
        weight = torch.randn(shape).to(dtype)
        tiles = tile_weight(weight, rows)
        chunk = 16 // dtype.itemsize
        assert tiles.shape == (*shape[:-2], shape[-2] // rows, shape[-1] // chunk, rows, chunk)
        back = untile_weight(tiles)
        assert matrix_shape(tiles) == shape and back.dtype == dtype and back.is_contiguous()
        assert torch.equal(back.view(torch.uint8), weight.view(torch.uint8))


@pytest.mark.parametrize(("rows", "place"), [(16, 1), (32, 1)])
def test_memory_is_chunk_by_chunk_of_neighbouring_rows(rows: int, place: int) -> None:
    """16 bytes of the first row, the same 16 of the second, ..., then the next 16 of the first."""
    weight = (torch.arange(64 * 96) % 251).view(64, 96).to(torch.uint8)
    memory = tile_weight(weight, rows).view(-1)
    assert torch.equal(memory[:16], weight[0, :16]) and torch.equal(memory[16:32], weight[place, :16])
    assert torch.equal(memory[16 * rows : 16 * rows + 16], weight[0, 16:32])
    assert torch.equal(memory[96 * rows : 96 * rows + 16], weight[rows, :16])


def test_the_matrix_name_is_no_copy() -> None:
    tiles = tile_weight(torch.randn(2, 32, 64))
    assert as_matrix(tiles).shape == (2, 32, 64) and as_matrix(tiles).data_ptr() == tiles.data_ptr()
    weight = torch.randn(32, 64)
    assert plain(weight) is weight and torch.equal(plain(tile_weight(weight)), weight)


def test_what_does_not_divide_is_an_error() -> None:
    assert fits_tiles(48, 64) and not fits_tiles(48, 64, 32) and not fits_tiles(40, 64) and not fits_tiles(48, 48)
    for shape, rows in (((40, 64), 16), ((48, 64), 32), ((48, 48), 16)):
        with pytest.raises(ValueError, match=f"a weight of {shape[0]} rows of {shape[1]} does not divide into tiles"):
            tile_weight(torch.zeros(shape), rows)
