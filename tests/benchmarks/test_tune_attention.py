"""The tuner's own rules; what it measures needs a GPU."""

import torch

from tests.conftest import interpreted

with interpreted():  # its kernels are those of other tests in this process
    from benchmarks.tune_attention import BATCHES, PAGE, Heads, Tensors, candidates, contexts
    from services.worker.kernels.impl.triton._decode_attention import default_shape


def test_every_batch_has_short_contexts_and_its_own_number_of_rows() -> None:
    for rows in BATCHES:
        found = contexts(rows)
        assert next(iter(found)) == "us" and all(len(lengths) == rows for lengths in found.values())


def test_the_default_is_a_candidate_and_none_comes_twice() -> None:
    found = candidates(torch.device("cpu"))
    assert found[0] == default_shape(2, 2, 128, True) and len(set(found)) == len(found)


def test_tables_read_different_blocks_until_they_are_used_again() -> None:
    heads = Heads(4, 2, 16)
    pool = torch.zeros(2 * 300 * PAGE * 2 * 16, dtype=torch.bfloat16)
    tensors = Tensors(heads, [640] * 3, pool)
    tables = torch.cat([rows.block_tables for rows in tensors.batches])
    assert len(tensors.batches) == 300 // 120 and len(set(tables.flatten().tolist())) == tables.numel()
    assert tensors.bytes == 3 * 640 * heads.token_bytes
    uneven = Tensors(heads, [640, 640, 2000], pool).batches[0]
    read = [table[: -(-length // PAGE)] for table, length in zip(uneven.block_tables, [640, 640, 2000], strict=True)]
    assert len(set(torch.cat(read).tolist())) == 40 + 40 + 125
