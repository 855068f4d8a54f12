"""Which implementation serves each op: chosen by facts, refused by rule, tested before it serves. Called by the engine.

The order: what earlier starts found out, else a self-test in child processes; then the one binding of this process,
with finders that know what failed. So no provider is imported here before a child has imported it. State: files only.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from common.config import Config
from services.worker import compile as levels
from services.worker.compile_cache import content_key
from services.worker.group import Group
from services.worker.kernels.ops.all_reduce import all_reduce
from services.worker.kernels.ops.all_reduce_add_norm import all_reduce_add_norm
from services.worker.kernels.registry import Bindings, F, Facts, Op, bind
from services.worker.models.spec import DecoderSpec
from services.worker.self_test import Job, Kept, NotTested, SelfTest, Verdict, finder_without, tell, wanted

log = logging.getLogger("worker")
FOLDER = "self-test"


class Bench(NamedTuple):
    """Where kernels are tested, and where what comes of it is kept."""

    device: torch.device
    root: Path  # of this user's caches
    watched: Path | None = None  # where builds write
    test: Callable[[Job, Callable[[str, int], None]], tuple[Verdict, ...]] | None = None  # in place of SelfTest
    again: bool = False  # whatever is known already
    uncalled: bool = False  # ops too that are bound, but not called by this model


def shapes_of(config: Config, spec: DecoderSpec) -> dict[str, int]:
    """What kernels/real_cases.py asks for, by its names (SHAPES)."""
    moe, delta = spec.moe, spec.delta
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": 0 if moe is not None and not moe.dense_layers else spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rotary_dim": spec.rope.rotary_dim,
        "qkv_bias": int(spec.qkv_bias),
        "out_bias": int(spec.out_bias),
        "qk_norm": int(spec.qk_norm),
        "num_experts": moe.num_experts if moe else 0,
        "top_k": moe.top_k if moe else 0,
        "expert_size": moe.inner if moe else 0,
        "renormalize": int(moe.renormalize) if moe else 0,
        "clamped": int(moe.clamped) if moe else 0,
        "gelu": int(spec.activation == "gelu_tanh"),
        "value_dim": spec.value_dim,
        "attention_gate": int(spec.attention_gate),
        "shared_size": moe.shared_inner if moe and moe.shared_gate else 0,
        "delta_heads": delta.heads if delta else 0,
        "delta_value_heads": delta.value_heads if delta else 0,
        "delta_key_dim": delta.key_dim if delta else 0,
        "delta_value_dim": delta.value_dim if delta else 0,
        "delta_taps": delta.taps if delta else 0,
        "delta_drafts": delta.drafts if delta else 0,
        "expert_groups": moe.grouped.num_groups if moe and moe.grouped else 0,
        "top_groups": moe.grouped.top_groups if moe and moe.grouped else 0,
        "softmax_groups": int(moe.grouped.softmax) if moe and moe.grouped else 0,
        "max_rows": config.scheduler.max_rows,
        "step_tokens": config.scheduler.step_tokens,
    }


def bind_tested(
    config: Config, facts: Facts, spec: DecoderSpec, level: int, bench: Bench, report: Callable[[str, int], None]
) -> tuple[Bindings, tuple[Verdict, ...]]:
    """The bindings, and what the self-test said. Raises BindError."""
    verdicts: tuple[Verdict, ...] = ()
    if wanted(config.worker.self_test, facts.arch):
        job = Job(
            priority=config.worker.kernels,
            device=str(bench.device),
            arch=facts.arch,
            dtype=str(facts.dtype).removeprefix("torch."),
            shapes={**facts.shapes, **shapes_of(config, spec)},
            captures=level == levels.CAPTURED and facts.device != "cpu",
        )
        verdicts = judged(job, config, bench, report)
        if bench.uncalled:
            tried = tuple(verdict for verdict in verdicts if verdict.cases or verdict.reason or not verdict.op)
            rest = msgspec.structs.replace(job, shapes={**job.shapes, "uncalled": 1}, verdicts=tried)
            verdicts = judged(rest, config, bench, report) or verdicts
    finder = finder_without(facts, verdicts)
    return bind(config.worker.kernels, facts, finder=finder, opaque=level > levels.EAGER), verdicts


def with_right_sums(
    config: Config, facts: Facts, level: int, bindings: Bindings, verdicts: tuple[Verdict, ...], group: Group
) -> Bindings:
    """A provider's sums over ranks can be tried only by all of them: the bindings, or such without a wrong one."""
    wrong = (
        *wrong_sums(all_reduce, group.sums_rightly, bindings, facts, group.rank.ranks),
        *wrong_sums(all_reduce_add_norm, group.norms_rightly, bindings, facts, group.rank.ranks),
    )
    if not wrong:
        return bindings
    tell(wrong, known=False)
    finder = finder_without(facts, (*verdicts, *wrong))
    return bind(config.worker.kernels, facts, finder=finder, opaque=level > levels.EAGER)


def wrong_sums(
    op: Op[F], rightly: Callable[[F, torch.dtype, int], bool], bindings: Bindings, facts: Facts, ranks: int
) -> tuple[Verdict, ...]:
    """At most one verdict, about the op's provider. The process group's own sums need no trial."""
    provider = bindings.provider(op)
    if provider == "torch" or rightly(bindings(op), facts.dtype, facts.shapes["hidden_size"]):
        return ()
    return (Verdict(op.name, provider, f"{provider}: its sums over {ranks} ranks are wrong"),)


def judged(job: Job, config: Config, bench: Bench, report: Callable[[str, int], None]) -> tuple[Verdict, ...]:
    """Known verdicts, or those of a self-test now."""
    kept = Kept(bench.root / FOLDER, content_key(job.arch, content_of(job, bench.device)))
    if not bench.again and (known := kept.load()):
        tell(known, known=True)
        return known
    test = bench.test or SelfTest(config.worker.self_test_s, bench.watched)
    try:
        verdicts = test(job, report)
    except NotTested as problem:
        log.warning("kernels are not tested: %s", problem)
        return ()
    tell(verdicts, known=False)
    good = sum(1 for verdict in verdicts if verdict.op and not verdict.reason)
    log.info("self-test: %d kernels are right at this model's shapes, %d are not", good, failures(verdicts))
    kept.save(verdicts)
    return verdicts


def failures(verdicts: tuple[Verdict, ...]) -> int:
    return sum(1 for verdict in verdicts if verdict.reason)


def content_of(job: Job, device: torch.device) -> Mapping[str, Any]:
    """What a verdict depends on besides sources, libraries and the architecture, which content_key knows."""
    units = 0 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
    return {
        "priority": list(job.priority),
        "device": device.type,
        "units": units,
        "dtype": job.dtype,
        "shapes": job.shapes,
        "captures": job.captures,
    }
