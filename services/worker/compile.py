"""What is compiled at which level, and how much was compiled or found ready. Called by the engine at start.

Levels: 0 eager, 1 traced and run as it is, 2 by inductor, 3 as 2 where that can gain anything, with decode steps
captured (the runner's work). All layers of one kind share one compiled graph, because weights are its inputs: three
graphs for any number of layers and tokens, and three more for a single token.
"""

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.worker.kernels.ops.add_linear import add_linear
from services.worker.kernels.ops.gelu_and_mul import gelu_and_mul
from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear
from services.worker.kernels.ops.norm_linear import norm_linear
from services.worker.kernels.ops.norm_route import norm_route
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Bindings
from services.worker.layers.decoder import Decoder, Pieces

log = logging.getLogger("worker")

EAGER, TRACED, INDUCTOR, CAPTURED = range(4)
AUTOMATIC = -1
OWN = "services.worker."
TRITON_BUILDS = "services.worker.kernels.impl.triton._builds"

# ops whose meanings a compiler fuses with each other; a matrix product alone gains nothing
FUSIBLE = (rms_norm, norm_linear, add_linear, norm_gated_linear, norm_route, silu_and_mul, gelu_and_mul)

Backend = str | Callable[..., Any]


def choose_level(wanted: int, device: torch.device) -> int:
    """`worker.compile_level`; -1 is the highest where it pays: on a GPU."""
    if wanted != AUTOMATIC:
        return wanted
    return EAGER if device.type == "cpu" else CAPTURED


def is_worth_compiling(level: int, bindings: Bindings) -> bool:
    """At level 3 only if pieces hold something to fuse: calls of opaque kernels cost more host time when compiled."""
    if level == CAPTURED:
        return any(bindings.provider(op) == "torch" for op in FUSIBLE)
    return level > EAGER


def compile_pieces(level: int, model: Decoder, backend: Backend = "") -> Pieces:
    """The model's pieces at this level; nothing is compiled before the first call. `backend` replaces the level's."""
    if level == EAGER:
        return model.pieces
    for weight in tensors_of((model.embedding, model.layers), set()):
        torch._dynamo.mark_static(weight)  # only the number of tokens varies; fixed widths make better kernels
    # a number of the model (a norm's epsilon) is a constant of the code, not an input that each call wraps in a tensor
    torch._dynamo.config.specialize_float = True
    if level >= INDUCTOR:
        # a handful of small kernels: a pool of processes that import torch would take longer than compiling them
        inductor: Any = importlib.import_module("torch._inductor.config")
        inductor.compile_threads = 1

    def compiled(piece: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(
            piece, backend=backend or ("eager" if level == TRACED else "inductor"), fullgraph=True, dynamic=True
        )

    return Pieces(compiled(model.pieces.start), compiled(model.pieces.between), compiled(model.pieces.end))


def tensors_of(value: object, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that objects of this package hold, each object once. `seen`: ids of objects that are kept alive."""
    if id(value) in seen:
        return
    seen.add(id(value))
    held: Iterable[object] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        held = value
    elif isinstance(value, dict):
        held = value.values()
    elif type(value).__module__.startswith(OWN):
        held = getattr(value, "__dict__", {}).values()
    for item in held:
        yield from tensors_of(item, seen)


class Builds(NamedTuple):
    """Kernels and graphs since the process start: compiled, or found in the cache."""

    compiled: int
    found: int


def build_ahead(bindings: Bindings, dry_run: Callable[[], None], report: Callable[[int, int], None]) -> None:
    """Compiles by all cores what `dry_run` needs, where a model's ops are Triton's: it computes nothing then.

    With an op of torch's among them it would read what no kernel has written, so that indices could lie anywhere.
    """
    if others := [row for row in bindings.table if row.op in bindings.asked and row.provider != "triton"]:
        names = ", ".join(f"{row.op} by {row.provider}" for row in others)
        log.info("kernels are compiled one after the other, since not all are Triton's: %s", names)
        return
    from services.worker.kernels.impl.triton import _ahead

    if not _ahead.is_first():
        return
    with _ahead.collect() as asked:
        dry_run()
    asked.build(len(os.sched_getaffinity(0)), report)


def builds() -> Builds:
    """Reads the counters of inductor and of Triton, as far as these are in use; imports nothing."""
    compiled = found = 0
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        counters = dynamo.counters["inductor"]
        compiled = counters["fxgraph_cache_miss"] + counters["fxgraph_cache_bypass"]
        found = counters["fxgraph_cache_hit"]
    if triton := sys.modules.get(TRITON_BUILDS):
        compiled, found = compiled + triton.COUNTS["compiled"], found + triton.COUNTS["found"]
    return Builds(compiled, found)


def newest_builds(count: int) -> list[str]:
    """Names of the Triton kernels among the last `count` that `builds` has counted, as far as they are remembered."""
    triton = sys.modules.get(TRITON_BUILDS)
    return list(triton.NEWEST)[-count:] if triton is not None and count > 0 else []


def count_builds() -> None:
    """From now on Triton's kernels are counted, where it is installed. Inductor always counts."""
    if importlib.util.find_spec("triton") is not None:
        importlib.import_module(TRITON_BUILDS).watch()
