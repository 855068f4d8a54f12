import torch

from services.worker.kernels.ops.top_k_floor import top_k_floor


def slow(logits: list[float], temperature: float, top_k: int, top_p: float) -> float:
    best = sorted(logits, reverse=True)[:top_k]
    weights = [torch.tensor((value - best[0]) / temperature, dtype=torch.float64).exp().item() for value in best]
    mass, total = 0.0, sum(weights)
    for value, weight in zip(best, weights, strict=True):
        mass += weight
        if mass >= top_p * total * (1 - 1e-9):
            return value
    return best[-1]


def test_equals_sorting() -> None:
    for case in top_k_floor.cases:
        logits, temperature, top_k, top_p, max_k = case.make(torch.float32)
        got = top_k_floor.meaning(logits, temperature, top_k, top_p, max_k)
        wanted = [
            slow(logits[row].tolist(), temperature[row].item(), int(top_k[row]), top_p[row].item())
            for row in range(len(logits))
        ]
        assert got.tolist() == wanted, case.name


def test_top_k_of_one_is_the_maximum() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    one = torch.ones(1)
    assert top_k_floor.meaning(logits, one, torch.tensor([1]), one * 0.1, 3).tolist() == [2.0]
