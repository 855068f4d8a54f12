import psutil
import pytest
import torch

from common.errors import ConfigError
from services.worker.groups import Storage, lay_out
from services.worker.memory import (
    GIB,
    Limits,
    Readings,
    Shape,
    choose_blocks,
    choose_pools,
    cpu_free_bytes,
    for_cache,
    table,
    zeros,
)
from services.worker.models.caches import PagedKv, RecurrentState, StateTensor

SHAPE = Shape(max_rows=4, max_len=100, block_tokens=16)
READINGS = Readings(total=80 * GIB, others=2 * GIB, weights=16 * GIB, activations=3 * GIB, graphs=1 * GIB)


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


def test_a_refusal_says_how_much_is_missing_and_what_to_change() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_blocks(GIB, SHAPE, Limits(0, 0.0, 5 * GIB + GIB // 2))
    text = str(caught.value)
    assert "5 KV blocks fit (of 5.50 GiB free)" in text and "2.00 GiB are missing" in text
    for setting in ("kv.gpu_memory_utilization", "model.max_len", "scheduler.step_tokens", "scheduler.max_rows"):
        assert setting in text


def test_less_than_nothing_left_is_a_refusal_too() -> None:
    with pytest.raises(ConfigError, match=r"^0 KV blocks fit \(of -3\.00 GiB free\).*10\.00 GiB are missing"):
        choose_blocks(GIB, SHAPE, Limits(0, 0.0, -3 * GIB))


def test_spare_blocks_are_paid_but_not_counted() -> None:
    assert choose_blocks(GIB, SHAPE, Limits(0, 0.0, 10 * GIB), spare=1).num_blocks == 9
    assert choose_blocks(GIB, SHAPE, Limits(8, 0.0, 0, most_bytes=9 * GIB), spare=1).num_blocks == 8


def test_what_is_configured_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"1\.00 GiB more than the GPU has left: lower kv\.blocks or kv\.memory_gib"):
        choose_blocks(GIB, SHAPE, Limits(9, 0.0, 0, most_bytes=9 * GIB), spare=1)
    with pytest.raises(ConfigError, match=r"3\.00 GiB more than the GPU has left"):
        choose_blocks(GIB, SHAPE, Limits(0, 12.0, 0, most_bytes=9 * GIB))


def test_the_cache_gets_what_everything_else_leaves_of_the_share() -> None:
    assert READINGS.left == 58 * GIB
    assert for_cache(READINGS, 1.0) == 58 * GIB
    assert for_cache(READINGS, 0.5) == 18 * GIB
    assert for_cache(READINGS, 0.25) == -2 * GIB


def test_the_table_adds_up() -> None:
    assert table(READINGS, 50 * GIB) == (
        "GPU memory 80.00 GiB: weights 16.00, activations 3.00, graphs 1.00, KV cache 50.00, others 2.00, free 8.00"
    )


def test_free_memory_is_part_of_what_the_machine_has() -> None:
    assert 0 < cpu_free_bytes() <= min(4 * GIB, psutil.virtual_memory().total)


def test_zeros_are_writable_and_of_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
        tensor = zeros((3, 5), dtype, torch.device("cpu"))
        assert tensor.shape == (3, 5) and tensor.dtype == dtype and not tensor.any()
        tensor[1, 2] = 1
        assert tensor.sum() == 1


FLOAT = Storage(torch.float32, torch.float32)
WINDOWS = lay_out([PagedKv(1, 4, 4), PagedKv(1, 4, 4, 20)], 16, FLOAT)
STATE = lay_out([PagedKv(1, 4, 4), RecurrentState((StateTensor((32,)),))], 16, FLOAT, every=32)


def test_groups_of_one_pool_get_what_both_need() -> None:
    """A sequence of 100 tokens has 7 pages and 4 of its window, and there are 4 rows."""
    (size,) = WINDOWS.block_bytes(16, FLOAT)
    assert choose_pools(WINDOWS, (size,), SHAPE, Limits(0, 0.0, 30 * size)).pools == (30,)
    assert choose_pools(WINDOWS, (size,), SHAPE, Limits(0, 0.0, 1000 * size)).pools == (4 * 11,)
    assert choose_pools(WINDOWS, (size,), SHAPE, Limits(11, 0.0, 0)).pools == (11,)
    budget = choose_pools(WINDOWS, (size,), SHAPE, Limits(0, 0.0, 22 * size))
    assert "in groups (full, window 20)" in budget.text and "2.0 sequences of 100" in budget.text
    with pytest.raises(ConfigError, match=r"10 KV blocks fit .* one sequence needs 11 blocks"):
        choose_pools(WINDOWS, (size,), SHAPE, Limits(0, 0.0, 10 * size))
    with pytest.raises(ConfigError, match="more than the GPU has left"):
        choose_pools(WINDOWS, (size,), SHAPE, Limits(44, 0.0, 0, most_bytes=43 * size))


def test_pools_are_filled_by_sequences() -> None:
    """Each has 7 pages, a live state and a checkpoint for every 32 tokens, and one to be copied from."""
    sizes = STATE.block_bytes(16, FLOAT)
    assert sizes == (16 * 8 * 4, 32 * 4)
    one = 7 * sizes[0] + 5 * sizes[1]
    assert choose_pools(STATE, sizes, SHAPE, Limits(0, 0.0, 3 * one)).pools == (21, 15)
    assert choose_pools(STATE, sizes, SHAPE, Limits(0, 0.0, 3 * one + 640), spare=1).pools == (21, 15)
    assert choose_pools(STATE, sizes, SHAPE, Limits(0, 0.0, 10**9)).pools == (28, 20)
    assert choose_pools(STATE, sizes, SHAPE, Limits(14, 0.0, 0)).pools == (14, 10)
    with pytest.raises(ConfigError, match="one sequence needs 7 blocks"):
        choose_pools(STATE, sizes, SHAPE, Limits(0, 0.0, one // 2))


def test_layers_that_keep_everything_are_sized_as_ever() -> None:
    plain = lay_out([PagedKv(1, 4, 4)], 16, FLOAT)
    limits = Limits(0, 0.0, 9500)
    budget = choose_pools(plain, (1000,), SHAPE, limits, 1)
    assert budget == choose_blocks(1000, SHAPE, limits, 1)._replace(pools=(8,))
