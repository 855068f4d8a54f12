"""What is read of a file, whole and in parts, in pieces of a small ring; and a file that changes."""

import os
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from services.worker import file_reader
from services.worker.file_reader import FileReader, Place

HEAD = 24  # bytes in front


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "numbers"


def place_of(path: Path, values: torch.Tensor) -> Place:
    path.write_bytes(bytes(HEAD) + values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return Place(path, HEAD, tuple(values.shape), values.dtype)


@pytest.mark.parametrize("slot", [1 << 20, 64, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_part_in_any_dtype(path: Path, slot: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a row does not fit the ring, and where several threads take their slices."""
    monkeypatch.setattr(file_reader, "SLOT_BYTES", slot)
    monkeypatch.setattr(file_reader, "SLICE_BYTES", 8)
    values = torch.randn(9, 10, 3).to(torch.bfloat16)
    place, reader = place_of(path, values), FileReader(threads=3)
    whole = (slice(0, 9), slice(0, 10), slice(0, 3))
    for window in ((), whole, (slice(2, 7), *whole[1:]), (slice(1, 8), slice(4, 10), slice(0, 2))):
        wanted = values[window]
        found = reader.read(place, dtype, window)
        assert found.dtype == dtype and found.is_contiguous() and torch.equal(found, wanted.to(dtype)), window
        assert torch.equal(reader.stored(place, window), wanted), window


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1)])
def test_small_and_empty_ones(path: Path, shape: tuple[int, ...]) -> None:
    values = torch.full(shape, 1.5)
    place = place_of(path, values)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(FileReader().read(place, dtype), values.to(dtype))


def test_a_result_is_not_the_rings(path: Path) -> None:
    values = torch.arange(6.0)
    reader = FileReader()
    first = reader.read(place_of(path, values), torch.float64)
    for _ in range(file_reader.SLOTS + 1):
        reader.read(place_of(path, values + 1), torch.float64)
    assert torch.equal(first, values.double())


def test_a_file_that_has_become_shorter(path: Path) -> None:
    """A mapped one would end the process."""
    place = place_of(path, torch.zeros(1000))
    os.truncate(path, HEAD + 100)
    with pytest.raises(ConfigError, match=rf"numbers ends at byte {HEAD + 100}"):
        FileReader().read(place, torch.float32)


def test_a_file_that_is_gone(path: Path) -> None:
    place = place_of(path, torch.zeros(4))
    path.unlink()
    with pytest.raises(ConfigError, match="numbers cannot be read: No such file"):
        FileReader().read(place, torch.float32)


def test_files_are_closed(path: Path) -> None:
    reader = FileReader()
    reader.read(place_of(path, torch.zeros(4)), torch.float32)
    (file,) = reader._files.values()
    del reader
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
