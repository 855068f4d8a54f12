import torch

from services.worker.kernels.ops.penalize import penalize


def test_equals_formula() -> None:
    for case in penalize.cases:
        logits, index, slots, in_output, in_prompt, presence, frequency, repetition = case.make(torch.float32)
        wanted = logits.double()
        for i, (row, slot) in enumerate(zip(index.tolist(), slots.tolist(), strict=True)):
            seen = in_prompt[slot] | (in_output[slot] > 0)
            value = wanted[row, seen]
            factor = repetition[i].double()
            wanted[row, seen] = value / factor * (value > 0) + value * factor * (value <= 0)
            wanted[row] -= in_output[slot] * frequency[i].double()
            wanted[row, in_output[slot] > 0] -= presence[i].double()
        penalize.meaning(logits, index, slots, in_output, in_prompt, presence, frequency, repetition)
        tolerance = penalize.tolerances[torch.float32]
        torch.testing.assert_close(logits.double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute)


def test_other_rows_and_barred_tokens_stay() -> None:
    logits, *rest = penalize.cases[1].make(torch.float32)
    before = logits.clone()
    logits[1, 5] = -torch.inf
    penalize.meaning(logits, *rest)
    assert torch.equal(logits[0::2], before[0::2])
    assert logits[1, 5] == -torch.inf and not logits[1].isnan().any()
