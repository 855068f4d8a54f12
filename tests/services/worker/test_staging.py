import numpy as np
import pytest
import torch

from services.worker.staging import ALIGNMENT, DEPTH, DeviceStaging, HostStaging, offsets, view

COLUMNS = (np.arange(5, dtype=np.int64), np.ones((2, 3), np.float32), np.array([7], np.int32))


def test_a_cpu_reads_the_arrays_themselves() -> None:
    staging = HostStaging()
    tensor = staging.put(COLUMNS[0])
    staging.send()
    staging.done()
    assert tensor.data_ptr() == COLUMNS[0].ctypes.data


def test_columns_lie_one_behind_the_other() -> None:
    starts, end = offsets(COLUMNS)
    assert starts == [0, 48, 80] and end == 96 and end % ALIGNMENT == 0
    columns, together = HostStaging().columns("kind", lambda: COLUMNS)
    for start, column, target in zip(starts, COLUMNS, columns, strict=True):
        target[...] = column
        assert np.array_equal(view(together, start, column).numpy(), column)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_many_steps_do_not_overtake_each_other() -> None:
    device = torch.device("cuda")
    staging = DeviceStaging(256, device)
    sums = []
    for step in range(20 * DEPTH):
        values = np.full(16, step, np.int64)
        small, large = staging.put(values), staging.put(np.full(400, step, np.int32))
        staging.send()
        torch.cuda._sleep(100_000)
        sums.append(small.sum() + large.sum())
        staging.done()
    assert [int(total) for total in sums] == [416 * step for step in range(20 * DEPTH)]
