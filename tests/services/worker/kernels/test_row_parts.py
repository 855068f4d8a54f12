"""Parts of rows, and slots and contexts by token, against a loop over the rows."""

import torch

from services.worker.kernels.ops.paged_attention import ChunkLoad, make_attention_rows
from services.worker.kernels.row_parts import RowParts, by_token, part_of, slots_of

COUNTS, CONTEXT = [1, 1, 5, 1, 3], [9, 4, 6, 2, 11]
TABLES = [[3, 1, 8], [5], [0, 7], [9], [2, 4, 6]]
ROWS = make_attention_rows(COUNTS, CONTEXT, TABLES, 4)


def places(row: int) -> list[int]:
    return [TABLES[row][position // 4] * 4 + position % 4 for position in range(CONTEXT[row])]


def test_parts_are_the_rows_that_decode_and_the_others() -> None:
    parts = RowParts.of(ROWS)
    assert RowParts.of(ROWS) is parts and (parts.num_decode, parts.num_chunks) == (2, 3)
    assert parts.decode.query_starts.tolist() == [0, 1, 2] and parts.decode.max_query == 1
    assert parts.chunks.query_starts.tolist() == [0, 5, 6, 9] and parts.chunks.context_lens.tolist() == [6, 2, 11]
    assert parts.chunks.num_decode == 0 and parts.chunks.block_tables[0, :2].tolist() == [0, 7]
    assert ROWS.chunk_load == ChunkLoad(19, 5 * 6 - 10 + 2 + 3 * 11 - 3, 32)
    assert parts.chunk_bounds.tolist() == [0, 6, 8, 19]
    assert parts.chunk_slots.tolist() == places(2) + places(3) + places(4)
    only = make_attention_rows([1, 1], [9, 4], TABLES[:2], 4)
    assert RowParts.of(only).decode is only and RowParts.of(only).num_chunks == 0
    chunks = make_attention_rows([5], [6], TABLES[2:3], 4)
    assert RowParts.of(chunks).chunks is chunks


def test_slots_behind_the_last_context_are_some_slot_of_it() -> None:
    part = part_of(ROWS, slice(0, 2))
    slots = slots_of(part, torch.tensor([0, 9, 13], dtype=torch.int32), 20).tolist()
    assert slots[:13] == places(0) + places(1) and set(slots[13:]) <= set(places(1))


def test_each_token_is_a_row_whose_context_ends_with_it() -> None:
    single = by_token(ROWS, 11)
    assert by_token(ROWS, 11) is single and single.num_decode == 11 and single.max_query == 1
    assert single.context_lens.tolist() == [9, 4, 2, 3, 4, 5, 6, 2, 9, 10, 11]
    assert single.tables[:, 0].tolist() == [3, 5, 0, 0, 0, 0, 0, 9, 2, 2, 2]
