"""Parts of tensors: of any kind equal to the part of the whole; of files only the part is read (their own tests)."""

import pytest
import torch

from services.worker.quant.narrow import Part, Zeros, narrow
from services.worker.random_weights import RandomTensor

WHOLE = RandomTensor("model.layers.0.mlp.down_proj.weight", (6, 10), torch.device("cpu"))


def test_a_part_is_that_of_the_whole() -> None:
    values = WHOLE.dense(torch.float32)
    columns = narrow(WHOLE, 1, 4, 10)
    assert columns.shape == (6, 6) and (columns.name, columns.source) == (WHOLE.name, WHOLE.source)
    assert torch.equal(columns.dense(torch.float32), values[:, 4:]) and columns.dense(torch.float32).is_contiguous()
    both = narrow(narrow(WHOLE, 0, 1, 4), 1, 2, 3)
    assert torch.equal(both.dense(torch.float32), values[1:4, 2:3])
    assert columns.storage == "F32", "formats must not ask for blocks"
    with pytest.raises(ValueError, match="no whole number of blocks"):
        columns.blocks()


def test_all_of_a_tensor_is_the_tensor() -> None:
    assert narrow(WHOLE, 0, 0, 6) is WHOLE
    assert isinstance(narrow(WHOLE, 0, 0, 5), Part)


def test_a_part_beyond_the_tensor_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError):
        _ = narrow(WHOLE, 1, 4, 11).shape


def test_zeros_stand_for_what_another_rank_counts() -> None:
    zeros = Zeros("a.bias", (5,), "file")
    assert torch.equal(zeros.dense(torch.bfloat16), torch.zeros(5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="not stored here"):
        zeros.blocks()
