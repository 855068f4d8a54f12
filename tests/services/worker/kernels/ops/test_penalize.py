from typing import Any

from torch import Tensor

from services.worker.kernels.ops.penalize import penalize


def test_equals_formula(check: Any) -> None:
    def formula(
        logits: Tensor, counts: Tensor, in_prompt: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
    ) -> Tensor:
        out = logits.clone()
        for row in range(len(logits)):
            seen = in_prompt[row] | (counts[row] > 0)
            value = out[row, seen]
            out[row, seen] = value / repetition[row] * (value > 0) + value * repetition[row] * (value <= 0)
            out[row] -= counts[row] * frequency[row]
            out[row, counts[row] > 0] -= presence[row]
        return out

    check(penalize, formula)
