import torch

from services.worker.kernels.ops.gather_tokens import gather_tokens


def test_reads_ids_and_writes_the_tables() -> None:
    for case in gather_tokens.cases:
        tokens, tables, places, token_rows, positions, slots, block_tokens = case.make(torch.float32)
        before = tokens.clone()
        ids = gather_tokens.meaning(tokens, tables, places, token_rows, positions, slots, block_tokens)
        assert ids.dtype == torch.int32
        assert ids.tolist() == [int(tokens.flatten()[place]) for place in places.tolist()]
        assert torch.equal(tokens, before)
        if tables is None:
            continue
        wanted = torch.full_like(tables, -1)
        for row, position, slot in zip(token_rows.tolist(), positions.tolist(), slots.tolist(), strict=True):
            wanted[row, position // block_tokens] = slot // block_tokens
        assert torch.equal(tables, wanted)
