import numpy as np
import torch

from common.columns import pack_i32
from common.protocol import RowStart, Sampling, StepPlan, Words
from services.worker import inputs
from services.worker.kernels.registry import Facts, bind
from services.worker.memory import Shape
from services.worker.sampler import Sampler
from services.worker.state import Rows

VOCAB = 200
SAMPLER = Sampler(bind(("torch",), Facts("cpu")))


def draw(logits: torch.Tensor, samplings: list[Sampling], outputs: list[list[int]]) -> list[int]:
    """The next token of each row, whose prompt is [1, 2] and whose output so far is given."""
    rows = Rows(Shape(len(samplings), 64, 8), VOCAB, (5,), torch.device("cpu"))
    added = [
        RowStart(slot, slot, pack_i32([1, 2, *output]), 2, 1 + len(output), pack_i32(range(8)), sampling)
        for slot, (sampling, output) in enumerate(zip(samplings, outputs, strict=True))
    ]
    count = len(samplings)
    step = rows.apply(
        StepPlan(
            1,
            added=added,
            slots=pack_i32(range(count)),
            positions=pack_i32(1 + len(output) for output in outputs),
            counts=pack_i32([1] * count),
            samples=b"\x01" * count,
        )
    )
    batch = inputs.sampling_batch(step.slots, step.positions + step.counts, rows, torch.from_numpy)
    tokens: list[int] = SAMPLER(logits.clone(), batch, rows.penalties).tolist()
    return tokens


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def slow_probabilities(logits: torch.Tensor, sampling: Sampling, output: list[int]) -> torch.Tensor:
    """Token by token, in float64, as the parameters are commonly defined."""
    values = logits.double().tolist()
    for token in range(VOCAB):
        count = output.count(token)
        if token in (1, 2) or count:
            factor = sampling.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    for token, bias in sampling.logit_bias:
        values[token] += bias
    if len(output) < sampling.min_tokens:
        for token in (5, *sampling.stop_token_ids):
            values[token] = -torch.inf
    probabilities = torch.softmax(torch.tensor(values, dtype=torch.float64) / sampling.temperature, 0)
    ordered = probabilities.sort(descending=True)
    keep = sampling.top_k or VOCAB
    mass, total = 0.0, ordered.values[:keep].sum()
    kept = []
    for probability, token in zip(ordered.values[:keep].tolist(), ordered.indices.tolist(), strict=False):
        if mass < sampling.top_p * total and probability >= sampling.min_p * ordered.values[0]:
            kept.append(token)
        mass += probability
    out = torch.zeros(VOCAB, dtype=torch.float64)
    out[kept] = probabilities[kept]
    return out / out.sum()


def test_draws_follow_the_slow_reference() -> None:
    output = [7, 7, 9]
    for sampling in (
        Sampling(8, temperature=0.8),
        Sampling(8, top_k=7),
        Sampling(8, top_p=0.8),
        Sampling(8, top_k=30, top_p=0.7, temperature=1.5),
        Sampling(8, min_p=0.1),
        Sampling(8, top_p=0.9, min_p=0.02),
        Sampling(8, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.9),
        Sampling(8, logit_bias=((3, 4.0), (8, -100.0)), min_tokens=9, stop_token_ids=(11,)),
    ):
        logits = make_logits(1, 3)
        logits[0, [1, 5, 7, 9, 11]] = torch.tensor([4.0, 7.0, 5.0, 4.5, 6.0])
        wanted = slow_probabilities(logits[0], sampling, output)
        count = 4000
        rows = [
            Sampling(**{name: getattr(sampling, name) for name in sampling.__struct_fields__} | {"seed": seed})
            for seed in range(count)
        ]
        counts = torch.bincount(torch.tensor(draw(logits.expand(count, -1), rows, [output] * count)), minlength=VOCAB)
        assert not counts[wanted == 0].any(), sampling
        big = wanted * count >= 5
        chi_square = ((counts - wanted * count)[big] ** 2 / (wanted * count)[big]).sum().item()
        freedom = int(big.sum())
        assert chi_square < freedom + 5 * (2 * freedom) ** 0.5, sampling


def test_greedy_takes_the_best_after_penalties_and_edits() -> None:
    logits = make_logits(4)
    logits[:, 9], logits[:, 5], logits[:, 30] = 20.0, 21.0, 19.0
    samplings = [
        Sampling(8, temperature=0.0),
        Sampling(8, temperature=0.0, min_tokens=3),
        Sampling(8, temperature=0.0, min_tokens=3, frequency_penalty=2.0),
        Sampling(8, temperature=0.0, logit_bias=((77, 100.0),)),
    ]
    assert draw(logits, samplings, [[9]] * 4) == [5, 9, 30, 77]


def test_the_same_request_alone_and_among_others() -> None:
    """Every kind of row, alone and in a batch of 32 of other kinds, in any order."""
    kinds = [
        Sampling(8, seed=1),
        Sampling(8, seed=2, top_k=9, top_p=0.9),
        Sampling(8, seed=3, top_p=0.95, temperature=0.6),
        Sampling(8, seed=4, min_p=0.05),
        Sampling(8, seed=5, repetition_penalty=1.3, presence_penalty=0.4),
        Sampling(8, seed=6, top_k=40, logit_bias=((3, 2.0),), min_tokens=5),
        Sampling(8, temperature=0.0),
        Sampling(8, seed=7, top_k=1),
    ]
    samplings = [kinds[i % 8] for i in range(32)]
    outputs = [[3, 4, 5][: i % 4] for i in range(32)]
    logits = make_logits(32, 8)
    together = draw(logits, samplings, outputs)
    alone = [draw(logits[i : i + 1], [samplings[i]], [outputs[i]])[0] for i in range(32)]
    assert together == alone
    backwards = draw(logits.flip(0), samplings[::-1], outputs[::-1])
    assert backwards[::-1] == together


def test_the_next_position_draws_anew() -> None:
    logits = make_logits(1).expand(40, -1) * 0.1
    outputs = [[3] * length for length in range(40)]
    assert len(set(draw(logits, [Sampling(8, seed=5)] * 40, outputs))) > 20


def test_top_k_of_one_and_tiny_top_p_are_greedy() -> None:
    logits = make_logits(2)
    best = logits.argmax(-1).tolist()
    assert draw(logits, [Sampling(8, seed=1, top_k=1), Sampling(8, seed=2, top_p=1e-6)], [[], []]) == best


def banning(banned: tuple[tuple[int, ...], ...], tokens: list[int], num_prompt: int, *allowed: int) -> int:
    """The greedy token of logits that fall with the id, behind these tokens."""
    rows = Rows(Shape(2, 32, 4), 20, (2,), torch.device("cpu"))
    sampling = Sampling(8, temperature=0.0, words=Words(allowed, banned), logit_bias=((19, 1.0),))
    rows.apply(StepPlan(1, added=[RowStart(1, 1, pack_i32(tokens), num_prompt, 0, pack_i32(range(4)), sampling)]))
    slots, context = np.array([1]), np.array([len(tokens)])
    logits = -torch.arange(20.0)[None]
    return int(SAMPLER(logits, inputs.sampling_batch(slots, context, rows, torch.from_numpy), None))


def test_a_banned_word_does_not_become_whole() -> None:
    assert banning(((0,),), [5, 6], 2) == 1
    assert banning(((6, 0),), [5, 6], 2) == 0, "the prompt does not count"
    assert banning(((6, 0),), [5, 6], 1) == 1
    assert banning(((6, 0), (1,), (9, 9, 2), (5, 6, 2)), [5, 6], 1) == 2, "of output there is one token"
    assert banning(((6, 0), (1,), (9, 9, 2), (5, 6, 2)), [4, 5, 6], 1) == 3


def test_only_allowed_tokens_come() -> None:
    assert banning((), [5, 6], 2, 7, 4, 9) == 4
    assert banning(((4,),), [5, 6], 2, 7, 4, 9) == 7
    assert banning((), [5, 6], 2, 19) == 19, "a bias opens no other one"
