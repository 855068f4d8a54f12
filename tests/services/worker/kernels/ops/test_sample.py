import torch

from services.worker.kernels.ops.sample import sample, uniform

MASK = 2**64 - 1


def mix(state: int) -> int:
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def slow_uniform(seed: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    mixed = mix((mix((seed + golden) & MASK) + (position + 1) * golden) & MASK)
    return (mixed >> 12) / 2**52


def test_uniform_is_splitmix64_on_unsigned_numbers() -> None:
    seeds = [0, 1, 2**63 - 1, -1, -(2**63), 123456789]
    positions = [0, 1, 7, 2**31, 5, 100_000]
    got = uniform(torch.tensor(seeds), torch.tensor(positions))
    assert got.tolist() == [
        slow_uniform(seed & MASK, position) for seed, position in zip(seeds, positions, strict=True)
    ]


def test_uniform_fills_the_interval_evenly() -> None:
    """Neighbouring seeds and positions are what choices of one request use."""
    for values in (
        uniform(torch.arange(50_000), torch.zeros(50_000, dtype=torch.int64)),
        uniform(torch.full((50_000,), 42), torch.arange(50_000)),
    ):
        counts = torch.histc(values.float(), 50, 0, 1)
        chi_square = ((counts - 1000) ** 2 / 1000).sum().item()
        assert chi_square < 85.4  # 0.1 % of 49 degrees of freedom
        assert abs(torch.corrcoef(torch.stack((values[:-1], values[1:])))[0, 1].item()) < 0.02


def test_is_the_inverse_of_the_cumulated_probability() -> None:
    for case in sample.cases:
        logits, temperature, floor, seeds, positions = case.make(torch.float32)
        got = sample.meaning(logits, temperature, floor, seeds, positions)
        assert got.dtype == torch.int32 and got.shape == (len(logits),)
        greedy = temperature == 0
        assert torch.equal(got[greedy], logits[greedy].argmax(-1).int())
        scaled = torch.where(logits < floor[:, None], -torch.inf, logits).double() / temperature[:, None].double()
        cumulated = torch.softmax(scaled, -1).cumsum(-1)
        for row, token in enumerate(got.tolist()):
            if greedy[row]:
                continue
            u = slow_uniform(int(seeds[row]) & MASK, int(positions[row]))
            low = cumulated[row, token - 1].item() if token else 0.0
            assert low - 1e-6 <= u <= cumulated[row, token].item() + 1e-6
            assert logits[row, token] >= floor[row]


def test_frequencies_are_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 300, generator=generator) * 2
    draws = 40_000
    rows = logits.expand(draws, -1)
    ones = torch.ones(draws)
    tokens = sample.meaning(rows, ones * 0.8, ones * -torch.inf, torch.arange(draws), torch.full((draws,), 9))
    wanted = torch.softmax(logits[0].double() / 0.8, -1) * draws
    counts = torch.bincount(tokens, minlength=300).double()
    big = wanted >= 10
    chi_square = ((counts - wanted)[big] ** 2 / wanted[big]).sum().item()
    freedom = int(big.sum())
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
    assert abs(counts[~big].sum() - wanted[~big].sum()) < 5 * wanted[~big].sum() ** 0.5


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, temperature, floor, seeds, positions = sample.cases[2].make(torch.float32)
    together = sample.meaning(logits, temperature, floor, seeds, positions)
    for row in range(len(logits)):
        one = slice(row, row + 1)
        alone = sample.meaning(logits[one], temperature[one], floor[one], seeds[one], positions[one])
        assert alone.item() == together[row].item()


def test_only_possible_tokens_even_at_extremes() -> None:
    """A single possible token is drawn whatever the random number; impossible ones never are."""
    logits = torch.full((64, 257), -torch.inf)
    logits[:, 256] = 3.0
    ones = torch.ones(64)
    tokens = sample.meaning(
        logits, ones * 1e-6, ones * -torch.inf, torch.arange(64), torch.zeros(64, dtype=torch.int64)
    )
    assert tokens.tolist() == [256] * 64
