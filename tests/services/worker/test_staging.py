import numpy as np
import pytest
import torch

from benchmarks.host_step import device
from services.worker.staging import ALIGNMENT, RING, Array, DeviceStaging, HostStaging, arrays, offsets, view

COLUMNS: tuple[Array, ...] = (np.arange(5, dtype=np.int64), np.ones((2, 3), np.float32), np.array([7], np.int32))


def test_a_cpu_reads_the_arrays_themselves() -> None:
    staging = HostStaging()
    staging.begin(0)
    tensor = staging.put(COLUMNS[0])
    staging.send()
    assert tensor.data_ptr() == COLUMNS[0].ctypes.data


def test_columns_lie_one_behind_the_other() -> None:
    starts, end = offsets(COLUMNS)
    assert starts == [0, 48, 80] and end == 96 and end % ALIGNMENT == 0
    together = torch.zeros(end, dtype=torch.uint8)
    for start, column, target in zip(starts, COLUMNS, arrays(together.numpy(), starts, COLUMNS), strict=True):
        target[...] = column
        assert np.array_equal(view(together, start, column).numpy(), column)


@pytest.mark.parametrize("first", [0, 64])
def test_all_that_is_put_arrives_in_one_copy(first: int) -> None:
    """Twice in a turn, behind inputs of a captured step or without them; what is too large arrives by itself."""
    with device():
        staging = DeviceStaging(256, torch.device("cpu"))
        for step in range(2 * RING):
            staging.begin(step % RING)
            values = [np.arange(first, dtype=np.uint8), *(column + step for column in COLUMNS)]
            tensors = [staging.put(column) for column in values]
            staging.send()
            later = np.full(3, step, np.int32)
            tensors.append(staging.put(later))
            staging.send()
            for tensor, column in zip(tensors, [*values, later], strict=True):
                assert np.array_equal(tensor.numpy(), column)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_many_steps_do_not_overtake_each_other() -> None:
    staging = DeviceStaging(256, torch.device("cuda"))
    events = [torch.cuda.Event() for _ in range(RING)]  # type: ignore[no-untyped-call]
    sums = []
    for step in range(5 * RING):
        events[step % RING].synchronize()
        staging.begin(step % RING)
        values = np.full(16, step, np.int64)
        small, large = staging.put(values), staging.put(np.full(400, step, np.int32))
        staging.send()
        torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
        sums.append(small.sum() + large.sum())
        events[step % RING].record()
    assert [int(total) for total in sums] == [416 * step for step in range(5 * RING)]
