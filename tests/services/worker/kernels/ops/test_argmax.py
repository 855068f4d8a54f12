import torch

from services.worker.kernels.ops.argmax import argmax


def test_is_the_first_maximum() -> None:
    for case in argmax.cases:
        (logits,) = case.make(torch.float32)
        wanted = [row.index(max(row)) for row in logits.tolist()]
        got = argmax.meaning(logits)
        assert got.tolist() == wanted and got.dtype == torch.int32, case.name


def test_ties_across_chunks_and_barred_tokens() -> None:
    logits = torch.full((4, 10_000), -torch.inf)
    logits[0, [100, 5000, 9000]] = 1.0
    logits[2, [8000, 9999]] = 1.0
    logits[3, 9999] = 1.0
    assert argmax.meaning(logits).tolist() == [100, 0, 8000, 9999]
