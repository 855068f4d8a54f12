import pytest
import torch

from common.errors import ConfigError
from services.worker.memory import GIB, Limits, Shape, choose_blocks, free_bytes, zeros

SHAPE = Shape(max_rows=4, max_len=100, block_tokens=16)


def test_limits_count_in_their_order() -> None:
    assert choose_blocks(1000, SHAPE, Limits(20, 1.0, 10**9)).num_blocks == 20
    assert choose_blocks(GIB // 10, SHAPE, Limits(0, 1.0, 10**9)).num_blocks == 10
    assert choose_blocks(1000, SHAPE, Limits(0, 0.0, 9500)).num_blocks == 9


def test_no_more_than_all_rows_can_use() -> None:
    assert choose_blocks(1000, SHAPE, Limits(0, 0.0, 10**9)).num_blocks == 4 * 7


def test_text_says_what_it_means() -> None:
    text = choose_blocks(GIB // 16, SHAPE, Limits(0, 1.0, 0)).text
    assert text.startswith("16 KV blocks of 16 tokens, 1.00 GiB (of 1.00 GiB set): 256 tokens, 2.3 sequences of 100")


def test_one_full_sequence_must_fit() -> None:
    with pytest.raises(ConfigError, match="one sequence needs 7 blocks"):
        choose_blocks(1000, SHAPE, Limits(6, 0.0, 0))
    assert choose_blocks(1000, SHAPE, Limits(7, 0.0, 0)).num_blocks == 7


def test_free_memory_is_part_of_what_the_machine_has() -> None:
    assert 0 < free_bytes(torch.device("cpu")) <= 4 * GIB


def test_zeros_are_writable_and_of_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
        tensor = zeros((3, 5), dtype, torch.device("cpu"))
        assert tensor.shape == (3, 5) and tensor.dtype == dtype and not tensor.any()
        tensor[1, 2] = 1
        assert tensor.sum() == 1
