import torch

from services.worker.kernels.ops.locate_rows import locate_rows


def test_entries_move_together() -> None:
    for case in locate_rows.cases:
        lengths, tables, slots, offsets, columns, draw, context, block_tokens, line = case.make(torch.float32)
        given, drawn = columns.clone(), draw.clone()
        locate_rows.meaning(lengths, tables, slots, offsets, columns, draw, context, block_tokens, line)
        for entry, (slot, offset) in enumerate(zip(slots.tolist(), offsets.tolist(), strict=True)):
            if offset < 0:
                assert torch.equal(columns[:, entry], given[:, entry]) and torch.equal(draw[:, entry], drawn[:, entry])
                continue
            position = int(lengths[slot]) - 1 + offset
            page, inside = divmod(position, block_tokens)
            slot_in_cache = int(tables[slot, page]) * block_tokens + inside
            assert columns[[0, 1, line], entry].tolist() == [slot * 70 + position, position, slot_in_cache]
            others = [i for i in range(2, len(columns)) if i != line]
            assert torch.equal(columns[others], given[others])
            assert context[entry] == position + 1 and draw[2, entry] == position + 1 - 5
        assert torch.equal(draw[[0, 1, 3]], drawn[[0, 1, 3]])
