import torch

from services.worker.kernels.ops.store_tokens import store_tokens


def test_writes_rows_and_the_line_of_results() -> None:
    for case in store_tokens.cases:
        tokens, results, places, sampled, ring, columns = case.make(torch.float32)
        wanted = tokens.clone()
        for place, token in zip(places.tolist(), sampled.tolist(), strict=True):
            wanted.view(-1)[place] = token
        store_tokens.meaning(tokens, results, places, sampled, ring, columns)
        assert torch.equal(tokens, wanted)
        if results is not None:
            where = list(range(len(sampled))) if columns is None else columns.tolist()
            assert results[ring.item(), where].tolist() == sampled.tolist()
            assert results.count_nonzero() == sampled.count_nonzero()
