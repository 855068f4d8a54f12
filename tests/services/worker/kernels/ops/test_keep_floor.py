import math

import torch

from services.worker.kernels.ops.keep_floor import keep_floor


def kept(values: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """How many of the values a slow selection keeps; values in descending order, without equals."""
    weights = [math.exp((value - values[0]) / temperature) for value in values]
    ranked = weights[: top_k or len(weights)]
    mass, count = 0.0, 0
    for weight in ranked:
        if mass < top_p * sum(ranked) * (1 - 1e-7) and weight >= min_p * (1 - 1e-6):
            count += 1
        mass += weight
    return count


def test_keeps_what_a_slow_selection_keeps() -> None:
    for case in keep_floor.cases:
        logits, temperature, top_k, top_p, min_p, max_k = case.make(torch.float32)
        got = keep_floor.meaning(logits, temperature, top_k, top_p, min_p, max_k)
        assert got.dtype == torch.float32 and got.shape == (len(logits),)
        for row in range(len(logits)):
            if not temperature[row]:
                assert got[row] == -torch.inf
                continue
            values = logits[row].double().sort(descending=True).values.tolist()
            limits = (temperature[row].item(), int(top_k[row]), top_p[row].item(), min_p[row].item())
            assert int((logits[row] >= got[row]).sum()) == kept(values, *limits), (case.name, row)


def test_no_limit_keeps_all() -> None:
    ones, zeros = torch.ones(2), torch.zeros(2)
    floor = keep_floor.meaning(torch.randn(2, 9), ones, zeros.long(), ones, zeros, 0)
    assert floor.tolist() == [-torch.inf] * 2
