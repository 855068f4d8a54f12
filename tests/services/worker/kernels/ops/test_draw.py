import torch

from services.worker.kernels.ops.draw import draw
from services.worker.kernels.ops.sample import uniform


def test_is_greedy_or_the_inverse_of_the_cumulated_probability() -> None:
    for dtype in draw.tolerances:
        for case in draw.cases:
            logits, temperature, seeds, positions = case.make(dtype)
            assert logits.dtype == dtype
            got = draw.meaning(logits, temperature, seeds, positions)
            assert got.dtype == torch.int32 and got.shape == (len(logits),)
            numbers = uniform(seeds, positions).tolist()
            for row, token in enumerate(got.tolist()):
                values = logits[row].double()
                if not temperature[row]:
                    assert token == values.tolist().index(values.max().item())
                    continue
                cumulated = torch.softmax(values / temperature[row].double(), -1).cumsum(-1)
                low = cumulated[token - 1].item() if token else 0.0
                assert low - 1e-6 <= numbers[row] <= cumulated[token].item() + 1e-6
