import numpy as np

from benchmarks.workloads import LOWEST_ID, Mix, Source, body


def test_lengths_are_exact_and_prompts_differ() -> None:
    asks = Source(1000).draw(Mix("random", 20, 7), 5)
    assert {(len(ask.prompt), ask.output_tokens) for ask in asks} == {(20, 7)}
    assert len({tuple(ask.prompt.tolist()) for ask in asks}) == 5
    assert all(ask.prompt.min() >= LOWEST_ID and ask.prompt.max() < 980 for ask in asks)
    request = body(asks[0], "m")
    assert (request["max_tokens"], request["ignore_eos"], request["temperature"]) == (7, True, 0)


def test_a_shared_prefix_is_shared() -> None:
    asks = Source(1000).draw(Mix("shared-prefix", 20, 7, prefix_tokens=12), 3)
    assert len({tuple(ask.prompt[:12].tolist()) for ask in asks}) == 1
    assert len({tuple(ask.prompt[12:].tolist()) for ask in asks}) == 3


def test_conversations_have_the_published_means() -> None:
    asks = Source(1000, seed=1).draw(Mix("chat", 0, 0), 4000)
    assert abs(np.mean([len(ask.prompt) for ask in asks]) - 161) < 16
    assert abs(np.mean([ask.output_tokens for ask in asks]) - 338) < 34


def test_arrivals_have_the_rate_and_the_seed_decides() -> None:
    arrivals = Source(1000, seed=3).arrivals_s(50.0, 2000)
    assert arrivals == sorted(arrivals) and abs(arrivals[-1] - 40) < 4
    assert arrivals == Source(1000, seed=3).arrivals_s(50.0, 2000)
