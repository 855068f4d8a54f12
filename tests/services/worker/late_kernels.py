"""A program: which kernels do steps ask for that a start's steps had not? In a process of its own, since nothing is
interpreted here: a driver says that there is an sm_90, kernels are noted and none is launched.

Prints how many kernels a start asks for, and a line for each that is late. Tensors are zeros, since nobody writes them.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.models import TINY, config_of
from benchmarks.shapes import ModelShape
from common.logprobs import Report
from common.pooling import Pooling
from common.protocol import Grammar, Sampling, StepPlan
from common.words import Words
from services.scheduler.drafting import may_draft
from services.worker import memory, warmup
from services.worker.drafting import Drafting
from services.worker.kernels.impl.triton import _ahead
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.decoder import build_decoder
from services.worker.layers.rope import RopeTable
from services.worker.loader import expected_shapes, load_parameters
from services.worker.model_engine import facts_of
from services.worker.models.registry import find_model
from services.worker.models.spec import Config
from services.worker.proposers import ngram_drafts
from services.worker.quant.registry import choose_policy
from services.worker.random_weights import draw_all
from services.worker.startup import Parts, run_all
from services.worker.warmup import Sizes, Work, draft_step, make_plan
from tests.services.worker.called_graphs import on_device
from tests.services.worker.spelled import grammars

CPU = torch.device("cpu")
MAX_LEN, MAX_ROWS, STEP_TOKENS, DRAFTS, STEPS = 800, 40, 300, 3, 46
SPARSE = ModelShape("Tiny-Sparse", 2, 64, 4, 4, 192, 64, 2048, 16, 2, shared=1, query_rank=64, chosen=660)
MODELS = ((TINY, torch.float32), (SPARSE, torch.bfloat16))
# What can be asked of a row: an example for each field. A new field without one is an error below.
POOLED = {"mode": Pooling("mean"), "normalize": Pooling("mean", normalize=False), "dimensions": Pooling(dimensions=16)}
REPORTS = {
    "top": [Report(top=3)],
    "prompt": [Report(top=0, prompt=2)],
    "named": [Report(top=2, named=(3, 5))],
    "pooling": [Report(pooling=pooling) for pooling in (Pooling(), *POOLED.values())],
}
ASKED: dict[str, list[dict[str, Any]]] = {
    "max_tokens": [{}],
    "seed": [{"temperature": 1.0, "seed": 2**63}],
    "temperature": [{"temperature": 0.3}],
    "top_p": [{"temperature": 0.3, "top_p": 0.5}],
    "top_k": [{"temperature": 0.3, "top_k": 5}],
    "min_p": [{"temperature": 0.3, "min_p": 0.5}],
    "presence_penalty": [{"presence_penalty": 1.0}],
    "frequency_penalty": [{"frequency_penalty": 1.0, "temperature": 1.0}],
    "repetition_penalty": [{"repetition_penalty": 1.1}],
    "min_tokens": [{"min_tokens": 2}],
    "ignore_eos": [{"ignore_eos": True}],
    "stop_token_ids": [{"stop_token_ids": (9,)}],
    "logit_bias": [{"logit_bias": ((7, 1.0),)}],
    "grammar": [{"grammar": Grammar("regex", "a*")}, {"grammar": Grammar("regex", "b*"), "temperature": 0.5}],
    "report": [{"report": report} for reports in REPORTS.values() for report in reports],
    "words": [{"words": Words(allowed=(3, 4))}, {"words": Words(banned=((7,), (5, 6)))}],
}
GREEDY = Sampling(max_tokens=2, temperature=0.0)


def kinds() -> list[Sampling]:
    """Raises AssertionError for a field that nothing here asks for."""
    for struct, examples in ((Sampling, ASKED), (Report, REPORTS), (Pooling, POOLED)):
        assert {field.name for field in msgspec.structs.fields(struct)} == set(examples), struct.__name__
    made = [msgspec.structs.replace(GREEDY, **changes) for every in ASKED.values() for changes in every]
    return [msgspec.structs.replace(each, max_tokens=0) if each.report.pooling is not None else each for each in made]


def parts_of(shape: ModelShape, dtype: torch.dtype) -> Parts:
    config = config_of(shape, 2 * MAX_LEN)
    _, model = find_model(config["architectures"])
    spec = model.read(Config(config))
    bindings = bind(("triton", "torch"), Facts("cuda", "sm_90", dtype, facts_of(CPU, dtype, spec, 16, dtype).shapes))
    policy = choose_policy(str(dtype).removeprefix("torch."), CPU, bindings)
    tensors = draw_all(expected_shapes(spec, model.names), CPU)
    decoder = build_decoder(spec, model, load_parameters(tensors, model, spec, policy), bindings)
    rope = RopeTable(spec.ropes, MAX_LEN, decoder.final_norm.weight)
    drafting = Drafting(DRAFTS, lambda site: ngram_drafts(site.bindings, 2, 4))
    more = {"drafting": drafting, "grammars": grammars(spec.vocab_size)}
    return Parts(decoder, bindings, rope, memory.Shape(MAX_ROWS, MAX_LEN, 16), (2,), CPU, dtype, **more)


def asked_for(parts: Parts, sizes: Sizes, plans: Sequence[StepPlan]) -> dict[Any, str]:
    """Kernels by Triton's keys, and how people call them."""
    runner = parts.runner(parts.small(sizes, spare=1))
    on_device(runner.rows)
    with _ahead.collect() as asked:
        run_all(runner, plans, lambda done, total: None)
    return {key: function.fn.__name__ for key, (function, _) in asked._kernels.items()}


def served(sizes: Sizes, every: Sequence[Sampling]) -> Iterator[tuple[str, StepPlan]]:
    """Steps as a scheduler makes them, each kind of row at least once in each form of step."""
    draw, drafted = random.Random(1), [each for each in every if may_draft(each, 1) and each.max_tokens]
    for number in range(STEPS):
        sampling = every[number % len(every)]
        vector = sampling.report.pooling
        if number % 5 == 4 and sampling in drafted:
            rows = draw.randint(1, sizes.most_drafting)
            yield f"{rows} rows with drafts, {sampling}", draft_step(sizes, rows, sampling)
            continue
        decoding = draw.choice([0, 1, 2, draw.randint(3, MAX_ROWS - 4)])
        count = draw.choice([1, 2, 16, draw.randint(3, 64), draw.randint(65, STEP_TOKENS - decoding)])
        position = draw.choice([0, draw.randint(1, MAX_LEN - 1 - count)])
        chunks = draw.randint(1, min(3, (STEP_TOKENS - decoding) // count))
        if vector is not None and vector.mode == "mean":
            position = 0  # a later chunk goes on with a sum, of which a kernel of ours knows nothing
        samples = vector is None and (count == 1 or draw.random() < 0.5)
        at = draw.randint(1, MAX_LEN - 2)
        work = [Work(at, 1, True, GREEDY if vector is not None else sampling)] * decoding
        work += [Work(position, count, samples, sampling)] * chunks
        yield f"{decoding} rows at {at}, {chunks} chunks of {count} at {position}, {sampling}", make_plan(sizes, work)


def no_product(*given: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    """Of torch.bmm and functional.linear: bf16 takes a CPU long, and nobody reads it."""
    left, right = given[:2]
    return out if out is not None else left.new_zeros(*left.shape[:-1], right.shape[-1 if right.dim() == 3 else 0])


class Driver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(Driver())
    torch.empty = lambda *size, pin_memory=False, **how: torch.zeros(*size, **how)  # type: ignore[assignment]
    torch.empty_like, torch.Tensor.new_empty = torch.zeros_like, torch.Tensor.new_zeros  # type: ignore[method-assign]
    torch.bmm = torch.nn.functional.linear = no_product  # type: ignore[assignment]
    every = kinds()
    for shape, dtype in MODELS:
        parts = parts_of(shape, dtype)
        sizes = Sizes(parts.shape, STEP_TOKENS, 0, parts.groups, DRAFTS, 8, vectors=True)
        start = [*warmup.all_kinds(sizes), *warmup.reporting(sizes), *warmup.largest_steps(sizes)]
        known = asked_for(parts, sizes, start)
        print(f"{shape.name}: {len(known)} kernels")
        for text, plan in served(sizes, every):
            for key, kernel in asked_for(parts, sizes, [plan]).items():
                if key not in known:
                    known[key] = kernel
                    print(f"late: {kernel} for {text}: {key[1]}")


if __name__ == "__main__":
    main()
