"""The tuner's own rules; what it measures needs a GPU."""

import torch

from tests.conftest import interpreted

with interpreted():  # its kernels are those of other tests in this process
    from benchmarks.tune_attention import (
        BATCHES,
        FEW,
        PAGE,
        PARTS,
        WAVES,
        Heads,
        Tensors,
        candidates,
        candidates_of_few,
        contexts,
        make_rows,
        merge,
        variants,
    )
    from services.worker.kernels.impl.triton._decode_attention import default_shape


def test_every_batch_has_short_contexts_and_its_own_number_of_rows() -> None:
    for rows in BATCHES:
        found = contexts(rows)
        assert next(iter(found)) == "us" and all(len(lengths) == rows for lengths in found.values())


def test_the_default_is_a_candidate_and_none_comes_twice() -> None:
    found = candidates(torch.device("cpu"))
    assert found[0] == default_shape(2, 2, 128, True) and len(set(found)) == len(found)


def test_few_rows_choose_among_dealt_and_fixed_parts() -> None:
    few, many = candidates_of_few(torch.device("cpu")), candidates(torch.device("cpu"))
    assert len(set(few)) == len(few) and all(shape.parts for shape in few) and not any(shape.parts for shape in many)
    assert [shape.parts for shape in variants(few[0], 1, 8)] == list(PARTS)
    assert variants(few[0], FEW, 8) and all(FEW * shape.parts <= 256 for shape in variants(few[0], FEW, 8))
    assert [shape.waves for shape in variants(many[0], 1, 8)] == list(WAVES)
    assert [shape.waves for shape in variants(many[0], 512, 8)] == [2.0]


def test_rows_that_were_not_measured_stay() -> None:
    def row(rows: int, head_dim: int, us: float) -> dict[str, object]:
        return {"rows": rows, "kv_heads": 8, "share": 2, "head_dim": head_dim, "kv_bytes": 2, "us": us}

    kept = [row(1, 128, 7.0), row(64, 128, 45.0), row(1, 64, 6.0)]
    assert merge(kept, [row(1, 128, 4.0), row(4, 128, 5.0)]) == [
        row(1, 128, 4.0),
        row(64, 128, 45.0),
        row(1, 64, 6.0),
        row(4, 128, 5.0),
    ]
    assert merge((), kept) == kept


def test_the_launch_ahead_writes_the_newest_tokens() -> None:
    heads = Heads(4, 2, 16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pool = torch.zeros(2 * 8 * PAGE * 2 * 16, device=device)
    tensors = Tensors(heads, [PAGE + 3] * 2, pool)
    tensors.q = tensors.q.float()
    tables = torch.tensor([[4, 1], [2, 5]], dtype=torch.int32, device=device)
    with interpreted():
        tensors.write(make_rows([PAGE + 3, PAGE], tables))()
    written = tensors.k.flatten(2).abs().sum(-1).nonzero().tolist()
    assert written == [[1, 2], [2, PAGE - 1]] and bool(tensors.v[1, 2].any())


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
