import pytest
import torch

from services.worker.kernels.ops.mask_logits import mask_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bit_is_a_token(dtype: torch.dtype) -> None:
    for case in mask_logits.cases:
        logits, mask = case.make(dtype)
        before = logits.clone()
        mask_logits.meaning(logits, mask)
        for row in range(len(logits)):
            for token in (*range(70), logits.shape[1] - 1):
                word = int(mask[row, token // 32]) & 0xFFFFFFFF
                allowed = bool(word >> (token % 32) & 1)
                assert logits[row, token] == (before[row, token] if allowed else -torch.inf)
