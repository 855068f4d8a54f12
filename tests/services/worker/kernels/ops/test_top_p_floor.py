import torch

from services.worker.kernels.ops.top_p_floor import _by_radix, top_p_floor


def test_equals_sorting() -> None:
    for case in top_p_floor.cases:
        logits, temperature, top_p = case.make(torch.float32)
        got = top_p_floor.meaning(logits, temperature, top_p)
        for row in range(len(logits)):
            ordered = logits[row].double().sort(descending=True).values
            mass = torch.softmax(ordered / temperature[row].double(), -1).cumsum(-1)
            kept = int((ordered >= got[row].double()).sum())
            # the kept tokens reach top_p and one less would not, up to the rounding of float32 sums
            assert mass[kept - 1] >= top_p[row] - 1e-5, case.name
            assert kept == 1 or mass[kept - 2] < top_p[row] + 1e-5, case.name
            assert bool((logits[row] == got[row]).any())


def test_looking_at_the_best_first_changes_nothing() -> None:
    """One row of each kind: settled by the best tokens, and by the radix selection."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 5000, generator=generator) * torch.tensor([[8.0], [0.1]])
    ones, top_p = torch.ones(2), torch.tensor([0.6, 0.6])
    weight = (logits - logits.amax(-1, keepdim=True)).exp()
    assert torch.equal(top_p_floor.meaning(logits, ones, top_p), _by_radix(logits, weight, top_p))


def test_extremes() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, -torch.inf], [1.0, 1.0, 1.0, 1.0]])
    ones = torch.ones(2)
    assert top_p_floor.meaning(logits, ones, ones * 1e-6).tolist() == [5.0, 1.0]
    assert top_p_floor.meaning(logits, ones, ones * 0.9999999).tolist()[0] >= -0.0


def test_ties_at_the_border_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0]])
    floor = top_p_floor.meaning(logits, torch.ones(1), torch.tensor([0.8]))
    assert floor.tolist() == [1.0]
