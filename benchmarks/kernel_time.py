"""Times of kernels on a GPU by graph replay, the device's ceilings, and the gate that comes before any figure.

A measurement replays one graph of calls on several sets of arguments, together larger than the L2 cache where that can
be, so that weights come from memory as in a step, and gaps between launches count. Callers: benchmarks/kernels.py.
"""

import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import torch

from benchmarks.gate import check, facts, tensors
from benchmarks.kernel_work import DTYPE, Run, Work
from benchmarks.shapes import ModelShape
from services.worker.kernels.registry import Impl, all_ops, find_impls

MOST_SETS = 32
MEASURE_S = 0.004  # of each of the ROUNDS
ROUNDS = 3
Works = Callable[[ModelShape, int], Iterable[Work]]  # of a model at a number of tokens; a function of a module
PROCESSES = 8  # each has its own context on the GPU


class Ceilings(NamedTuple):
    """What this device has been seen to do, not what its data sheet says."""

    bytes_per_s: float
    flops_per_s: float


class Row(NamedTuple):
    """One measurement. Times in microseconds per call."""

    op: str
    label: str
    model: str
    tokens: int
    us: float
    floor_us: float
    bound: str  # "bytes" or "flops"
    percent: float  # floor_us / us
    torch_us: float | None
    torch_how: str
    per_step: int  # calls in a decode step


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def impls() -> dict[str, Impl[Any]]:
    """Triton's implementations that this device can run."""
    found, reason = find_impls("triton")
    if not found:
        raise SystemExit(reason)
    return {name: impl for name, impl in found.items() if impl.refuses(facts(device(), DTYPE)) is None}


def timed_s(run: Callable[[], Any], times: int) -> float:
    """Seconds for `times` runs, on the device's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def per_call_us(run: Run, sets: Sequence[tuple[Any, ...]]) -> float:
    """Best of ROUNDS. Raises RuntimeError if the run cannot be captured."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for arguments in sets[:2]:
            run(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in sets:
            run(*arguments)
    timed_s(graph.replay, 1)
    once = timed_s(graph.replay, 1)
    times = max(1, min(200, math.ceil(MEASURE_S / once)))
    return min(timed_s(graph.replay, times) for _ in range(ROUNDS)) / times / len(sets) * 1e6


def argument_sets(work: Work, cache_bytes: int) -> list[tuple[Any, ...]]:
    """At least two, and so many that they exceed the cache four times, if MOST_SETS do."""
    first = work.make()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in tensors(first, "")}
    wanted = math.ceil(4 * cache_bytes / max(1, sum(storages.values())))
    return [first, *(work.make() for _ in range(min(max(wanted, 2), MOST_SETS) - 1))]


def best_s(run: Callable[[], Any], times: int) -> float:
    """Seconds per run, after some that do not count."""
    timed_s(run, 3)
    return min(timed_s(run, times) for _ in range(ROUNDS)) / times


def ceilings() -> Ceilings:
    """The best of a copy (bytes read and written) and of a sum (bytes read); a large bf16 product of random numbers."""
    source = torch.ones(1 << 30, device="cuda")
    size = source.numel() * source.element_size()
    target = torch.empty_like(source)
    moved = max(2 * size / best_s(lambda: target.copy_(source), 5), size / best_s(source.sum, 5))
    left, right = torch.randn(2, 8192, 8192, device="cuda", dtype=DTYPE)
    return Ceilings(moved, 2 * 8192**3 / best_s(lambda: left @ right, 10))


def measure(work: Work, run: Run, limit: Ceilings, try_compile: bool) -> Row:
    cache_bytes = torch.cuda.get_device_properties(device()).L2_cache_size
    sets = argument_sets(work, cache_bytes)
    us = per_call_us(run, sets)
    by_bytes, by_flops = work.num_bytes / limit.bytes_per_s * 1e6, work.flops / limit.flops_per_s * 1e6
    floor_us = max(by_bytes, by_flops)
    best = work.torch_best or all_ops()[work.op].meaning
    ways = {"eager": best}
    if try_compile:
        ways["compiled"] = torch.compile(best, dynamic=False)
    others: dict[str, float] = {}
    if work.prepare is not None:
        sets = [work.prepare(*arguments) for arguments in sets]
    for name, way in ways.items():
        try:
            others[name] = per_call_us(way, sets)
        except RuntimeError as error:
            # torch has no kernel for it, or one that waits for the host
            others[f"{name} cannot: {str(error).splitlines()[0][:60]}"] = math.inf
    how = min(others, key=others.__getitem__)
    return Row(
        op=work.op,
        label=work.label,
        model=work.model.name,
        tokens=work.tokens,
        us=us,
        floor_us=floor_us,
        bound="bytes" if by_bytes >= by_flops else "flops",
        percent=100 * floor_us / us,
        torch_us=None if math.isinf(others[how]) else others[how],
        torch_how=how,
        per_step=work.per_step,
    )


def _gate(op: str) -> str:
    """Empty, or what is wrong."""
    impl = impls()[op]
    dtype = DTYPE if DTYPE in impl.op.tolerances else torch.float32
    try:
        return "" if check(impl, device(), dtype) else f"{op}: refuses {dtype}"
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        return f"{op}: {str(error)[:600]}"


def _warm(works: Works, only: str, model: ModelShape, tokens: int) -> str:
    """Compiles what the measurements need, into Triton's cache."""
    found = impls()
    for work in works(model, tokens):
        if work.op in found and only in work.op:
            try:
                found[work.op].run(*work.make())
                torch.cuda.synchronize()
            except (AssertionError, RuntimeError, ValueError, TypeError) as error:
                return f"{work.key}: {str(error)[:600]}"
    return ""


def gate_and_warm(
    works: Works, only: str, models: Sequence[ModelShape], sizes: Sequence[int], done: Callable[[int, int], None]
) -> list[str]:
    """What is wrong: with answers, or with the measured shapes. In several processes: compiling is the host's work."""
    measured = {work.op for model in models for tokens in sizes for work in works(model, tokens)}
    names = [name for name in impls() if only in name and name in measured]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        todo = [pool.submit(_warm, works, only, model, tokens) for model in models for tokens in reversed(sizes)]
        todo += [pool.submit(_gate, name) for name in names]
        found = []
        for number, future in enumerate(as_completed(todo), 1):
            found.append(future.result())
            done(number, len(todo))
    return [text for text in found if text]
