"""One row's kernels, tuned where they run: in the chain of a layer.

Alone a kernel is fastest when it takes all of a processor that it can get. In a chain of dependent launches what it
takes is missing to the next one, whose weights could be on their way. So each kernel's choice is changed in turn in the
whole chain, from what the tables of the other sections say, and kept where the layer gets faster. A choice is dropped
that computes something else than the table's; of attention, one that is slower in long contexts.
"""

import math
import multiprocessing
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from benchmarks import tune_dense, tune_narrow
from benchmarks.moe import MODELS as MIXTURES
from benchmarks.moe import UP_FEW, few_downs
from benchmarks.narrow_work import stored
from benchmarks.shapes import LLAMA_8B, QWEN3_30B_A3B, QWEN3_600M, ModelShape
from benchmarks.tune_attention import LONG, LONGEST, Heads, Tensors
from benchmarks.tuning import Bench, Row, Section, Tuned, merged, seconds
from services.worker.kernels import tuned
from services.worker.kernels.impl.triton import _dense, _moe_plan, _narrow_fused, _narrow_plan, moe_gated, norm_route
from services.worker.kernels.impl.triton._decode_attention import Shape, choose, launch
from services.worker.kernels.impl.triton._moe_plan import Experts, Few
from services.worker.kernels.impl.triton.embedding import embedding_by_blocks
from services.worker.kernels.impl.triton.rope_kv_write import rope_kv_write_heads
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec
from services.worker.kernels.ops.rope_kv_write import HeadNorm

OP = "layer"
CHAINS = ((QWEN3_600M, ""), (LLAMA_8B, ""), (QWEN3_30B_A3B, ""), *((LLAMA_8B, form) for form in tune_narrow.FORMS))
CHAINS += ((LLAMA_8B, "rows8"),)
EPS, PAGE, CONTEXT = 1e-6, 16, 640
ROTATED = 400 << 20  # bytes of weights of all layers: more than the L2 cache holds
GEOMETRY = (  # block_kv, warps, stages of attention
    (32, 2, 4), (32, 2, 1), (32, 4, 1), (32, 1, 1), (64, 2, 2), (64, 2, 1), (64, 4, 1), (128, 4, 1),
)  # fmt: skip
ROUTES = ((4, 4), (4, 2), (2, 2), (2, 1), (1, 1), (8, 4), (2, 4))  # rows, warps of norm_route
POOL = 1 << 30  # numbers of keys and values that long contexts lie in
LOSS = 1.05  # of a long context's time: what is more is not worth a short one's
GAIN = 0.997  # of the time before: what is less is noise
SAME = {"paged_attention": ("rows", "kv_heads", "share", "head_dim", "kv_bytes"), "narrow": _narrow_plan.ASKED}
SAME |= dict.fromkeys(tune_dense.OPS, tune_dense.ASKED)
SAME["moe_gated"] = ("num_experts", "top_k", "hidden", "inner", "tokens")


class Stage(NamedTuple):
    """One launch of a layer. `plans`: the tables' first; `launch`: by a plan in a layer; `row`: the line of a table
    that says so, as its op and what the plan is part of."""

    name: str
    plans: tuple[Any, ...]
    launch: Callable[[Any, int], None]
    row: Callable[[Any], tuple[str, Row]] | None = None


class Chain:
    """One row's way through layers of a model, with weights of `form`, "" for bf16."""

    def __init__(self, model: ModelShape, form: str, device: torch.device, layers: int = 0) -> None:
        self.model, self.form, self.device = model, form, device
        active = model.layer_weights if not model.experts else model.attention_weights
        active += 3 * model.hidden * model.inner * model.top_k
        self.layers = layers or max(3, math.ceil(ROTATED / (2 * active)))
        self.norm = self.random(model.hidden).abs() + 0.5
        self.table, self.id = self.random(4, model.hidden), torch.zeros(1, dtype=torch.int32, device=device)
        self.x, self.qkv = self.random(1, model.hidden), self.random(1, model.qkv_width)
        self.q = self.random(1, model.heads, model.head_dim)
        self.attended, self.gated = self.random(1, model.q_width), self.random(1, model.inner)
        self.stages = tuple(self._stages())

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(0, scale)

    def run(self, plans: tuple[Any, ...]) -> Tensor:
        self.x = embedding_by_blocks(self.id, self.table)
        for layer in range(self.layers):
            for stage, plan in zip(self.stages, plans, strict=True):
                stage.launch(plan, layer)
        return self.x

    def result(self, plans: tuple[Any, ...]) -> list[Tensor]:
        """What the last layer's launches leave, each by itself: in x what attention adds is too little to be seen."""
        self.run(plans)
        return [each.clone() for each in (self.x, self.qkv, self.q, self.attended, self.gated)]

    def time(self, plans: tuple[Any, ...]) -> float:
        """Seconds of a layer."""
        return seconds([lambda: self.run(plans)]) / self.layers

    def _stages(self) -> Iterator[Stage]:
        m = self.model
        yield self._product("norm_linear", m.qkv_width, m.hidden, lambda: self.x, lambda: self.qkv, normed=True)
        yield from self._attention()
        yield self._product("add_linear", m.hidden, m.q_width, lambda: self.attended, lambda: self.x)
        if m.experts:
            yield from self._experts()
            return
        gate = lambda: self.gated  # noqa: E731
        yield self._product("norm_gated_linear", m.inner, m.hidden, lambda: self.x, gate, normed=True, gated=True)
        yield self._product("add_linear", m.hidden, m.inner, gate, lambda: self.x)

    def _product(
        self, op: str, out: int, inner: int, x: Callable[[], Tensor], target: Callable[[], Tensor],
        normed: bool = False, gated: bool = False,
    ) -> Stage:  # fmt: skip
        rows, add, activation = out * (2 if gated else 1), op == "add_linear", "silu" if gated else ""
        norm, device = (self.norm, EPS) if normed else None, _dense.describe(self.device)
        if not self.form:
            job = tune_dense.Job(op, 1, rows, inner)
            weights = [self.random(rows, inner, scale=inner**-0.5) for _ in range(self.layers)]

            def dense(plan: Any, layer: int) -> None:
                _dense.product(x(), norm, weights[layer], None, target(), plan, activation, add)

            first = _dense.plan(op, 1, rows, inner, torch.bfloat16, self.device)
            plans = tuple(dict.fromkeys([first, *tune_dense.candidates(job, device)]))
            key = {"rows": 1, "out": rows, "in": inner}
            return Stage(f"{op} {rows}x{inner}", plans, dense, lambda plan: (op, key | plan._asdict()))
        narrow_job = tune_narrow.Job(self.form, False, 1, out, inner, gated, normed)
        form = self.form.removesuffix("z")
        narrows = [_narrow_fused.narrow_of(*stored(form, rows, inner)) for _ in range(self.layers)]

        def narrow(plan: Any, layer: int) -> None:
            _narrow_plan.product(_narrow_plan.Inputs(x(), norm=norm), narrows[layer], target(), add, activation, plan)

        asked = tune_narrow.asked(narrow_job, 1)
        found = [_narrow_plan.choose(*asked, self.device), *tune_narrow.candidates(narrow_job, device)]
        told: Row = dict(zip(_narrow_plan.ASKED, asked, strict=True))
        return Stage(
            f"{self.form} {rows}x{inner}",
            tuple(dict.fromkeys(found)),
            narrow,
            lambda plan: ("narrow", told | plan._asdict()),
        )

    def _attention(self) -> Iterator[Stage]:
        m, blocks = self.model, CONTEXT // PAGE
        caches = [self.random(2, blocks, PAGE, m.kv_heads, m.head_dim) for _ in range(self.layers)]
        angles = self.random(2, 1, m.head_dim)
        tables = torch.randperm(blocks, device=self.device)[None].to(torch.int32)
        lengths = torch.tensor([CONTEXT], dtype=torch.int32, device=self.device)
        slots = (tables[0, -1:] * PAGE + PAGE - 1).to(torch.int64)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=self.device)
        rows = AttentionRows(starts, lengths, tables, PAGE, 1, CONTEXT, num_decode=1)
        head_norm = HeadNorm(self.random(m.head_dim), self.random(m.head_dim), EPS) if m.qk_norm else None
        spec = AttentionSpec(m.head_dim**-0.5)

        def rope(_: Any, layer: int) -> None:
            k_cache, v_cache = caches[layer].unbind(0)
            self.q = rope_kv_write_heads(self.qkv, angles[0], angles[1], k_cache, v_cache, slots, head_norm, None)

        def attend(shape: Shape, layer: int) -> None:
            out = self.attended.view(1, m.heads, m.head_dim)
            launch(self.q, out, caches[layer][0], caches[layer][1], rows, spec, shape)

        share, bf16 = m.heads // m.kv_heads, torch.bfloat16
        first = choose(self.device, bf16, bf16, 1, share, m.kv_heads, m.head_dim)
        shapes = [first]
        if not self.form:  # the others' tables are the same
            shapes += [
                Shape(*geometry, waves, first.fused, least, early)
                for geometry in GEOMETRY
                for early in (True, False)
                for waves in (1.0, 2.0)
                for least in (1, 2, 3)
            ]
        key = dict(zip(SAME["paged_attention"], (1, m.kv_heads, share, m.head_dim, 2), strict=True))
        yield Stage("rope_kv_write", (None,), rope)
        yield Stage(
            "paged_attention",
            tuple(dict.fromkeys(shapes)),
            attend,
            lambda shape: ("paged_attention", key | shape._asdict()),
        )

    def _experts(self) -> Iterator[Stage]:
        m = self.model
        shape = Experts(m.experts, m.top_k, m.hidden, m.inner)
        assert shape in MIXTURES.values()
        routers = [self.random(m.experts, m.hidden, scale=m.hidden**-0.5) for _ in range(self.layers)]
        gate_up = [self.random(m.experts, 2 * m.inner, m.hidden, scale=m.hidden**-0.5) for _ in range(self.layers)]
        down = [self.random(m.experts, m.hidden, m.inner, scale=m.inner**-0.5) for _ in range(self.layers)]
        routed = norm_route.run_few(self.x, self.norm, EPS, routers[0], None, m.top_k, True)

        def route(geometry: tuple[int, int], layer: int) -> None:
            nonlocal routed
            routed = norm_route.run_few(self.x, self.norm, EPS, routers[layer], None, m.top_k, True, *geometry)

        def up(plan: Few, layer: int) -> None:
            self.gated = moe_gated.few_up(plan, routed[0], routed[2], gate_up[layer])

        def out(plan: Few, layer: int) -> None:
            moe_gated.few_down(plan, self.gated, routed[1], routed[2], down[layer], self.x)

        first = _moe_plan.choose(shape, 1, self.device, torch.bfloat16)
        assert isinstance(first, Few)
        self.gated = self.random(m.top_k, m.inner)
        names = ("down_rows", "down_chunk", "down_warps", "down_experts")
        ups = [first, *(first._replace(up_rows=r, up_chunk=c, up_warps=w) for r, c, w in UP_FEW)]
        downs = [first, *(first._replace(**dict(zip(names, down, strict=True))) for down in few_downs(shape))]
        key = dict(zip(SAME["moe_gated"], (*shape, 1), strict=True))
        own = (norm_route.ROWS, norm_route.WARPS)
        yield Stage("norm_route", tuple(dict.fromkeys([own, *ROUTES])), route)
        yield Stage("experts up", tuple(dict.fromkeys(ups)), up, lambda plan: ("moe_gated", key | {"up": plan[:3]}))
        down_row = lambda plan: ("moe_gated", key | {"down": plan[3:]})  # noqa: E731
        yield Stage("experts down", tuple(dict.fromkeys(downs)), out, down_row)


@lru_cache(maxsize=1)
def _short(index: int) -> Chain:
    model, form = CHAINS[index]
    return Chain(model, form, torch.device("cuda", torch.cuda.current_device()), 1)


def compiled(task: tuple[int, int, Any]) -> tuple[tuple[int, int, Any], str]:
    """In a process of its own: launches once; returns why it cannot be, or nothing."""
    index, stage, plan = task
    try:
        _short(index).stages[stage].launch(plan, 0)
        torch.cuda.synchronize()
    except (TritonError, RuntimeError, AssertionError) as error:
        return task, f"{type(error).__name__}: {error}"
    return task, ""


def built(plan: Any, first: Any) -> Any:
    """What stands for a plan where it is compiled: numbers that the kernel is given are none of it."""
    return plan._replace(waves=first.waves, least=first.least) if isinstance(plan, Shape) else plan


def compile_all(bench: Bench, chains: list[list[tuple[Any, ...]]]) -> set[tuple[int, int, Any]]:
    """The candidates that run. chains: the plans of each one's stages. Takes at most 60 % of the time that is left."""
    tasks = list(
        dict.fromkeys(
            (index, stage, built(plan, plans[0]))
            for index, stages in enumerate(chains)
            for stage, plans in enumerate(stages)
            for plan in plans
        )
    )
    kept_s, good = 0.4 * bench.left_s(), set()
    context = multiprocessing.get_context("spawn")
    with context.Pool(bench.workers) as pool:
        results = pool.imap_unordered(compiled, tasks)
        for _ in tasks:
            try:
                task, reason = results.next(max(0.01, bench.left_s() - kept_s))
            except multiprocessing.TimeoutError:
                break
            if reason:
                print(f"{CHAINS[task[0]][0].name} {task[2]}: {reason.splitlines()[0][:160]}")
            else:
                good.add(task)
    print(f"{len(good)} of {len(tasks)} kernels ran, {bench.left_s():.0f} s left", flush=True)
    return good


def near(got: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(got, wanted, rtol=5e-2, atol=0.1 * float(wanted.float().std()))


def improved(
    chain: Chain, ran: Callable[[int, Any], bool], fits: Callable[[Any], bool], left_s: Callable[[], float]
) -> tuple[Any, ...]:
    """The chain's plans, each stage's changed in turn where the layer gets faster; prints what came of it.

    `ran`: whether a stage's plan was compiled; `fits`: whether one that is faster here may be kept.
    """
    plans = tuple(stage.plans[0] for stage in chain.stages)
    wanted = chain.result(plans)
    start = best = chain.time(plans)
    for number, stage in enumerate(chain.stages):
        times = {}
        for plan in stage.plans[1:]:
            if left_s() < 0 or not ran(number, plan):
                continue
            tried = (*plans[:number], plan, *plans[number + 1 :])
            if all(map(near, chain.result(tried), wanted)):
                times[plan] = chain.time(tried)
            else:
                print(f"{stage.name} {plan}: something else")
        faster = [plan for plan in sorted(times, key=times.__getitem__) if times[plan] < GAIN * best]
        kept = next((plan for plan in faster if fits(plan)), None)
        if kept is not None:
            print(
                f"  {stage.name}: {best * 1e6:.2f} to {times[kept] * 1e6:.2f} us a layer by {tuple(kept)}", flush=True
            )
            plans, best = (*plans[:number], kept, *plans[number + 1 :]), times[kept]
    end = chain.time(plans)
    print(f"{chain.model.name} {chain.form or 'bf16'}: {start * 1e6:.2f} to {end * 1e6:.2f} us a layer", flush=True)
    return plans


def joined(rows: list[tuple[str, Row]]) -> dict[str, list[Row]]:
    """By table; a mixture's two products become one line."""
    found: dict[str, list[Row]] = {}
    halves: Row = {}
    for op, row in rows:
        if op == "moe_gated":
            halves |= row
        else:
            found.setdefault(op, []).append(row)
    if halves:
        few = [*halves.pop("up"), *halves.pop("down")]
        found["moe_gated"] = [halves | {"few": few}]
    return found


class Long:
    """Whether a shape of attention keeps the speed of the table's in long contexts."""

    def __init__(self, model: ModelShape, first: Shape, device: torch.device) -> None:
        self.heads, self.first = Heads(model.heads, model.kv_heads, model.head_dim), first
        self.pool = torch.empty(POOL, dtype=torch.bfloat16, device=device).normal_()
        self.cases = [Tensors(self.heads, [length], self.pool) for length in (LONG, LONGEST)]
        self.limits = [LOSS * case.time(first) for case in self.cases]

    def keeps(self, shape: Shape) -> bool:
        return all(case.time(shape) <= limit for case, limit in zip(self.cases, self.limits, strict=True))


def run(bench: Bench) -> list[Tuned]:
    plans = [[stage.plans for stage in Chain(*chain, bench.device, 1).stages] for chain in CHAINS]
    good = compile_all(bench, plans)
    rows: list[tuple[str, Row]] = []
    for index, (model, form) in enumerate(CHAINS):
        chain = Chain(model, form, bench.device)
        shapes = next(stage for stage in plans[index] if isinstance(stage[0], Shape))
        long = Long(model, shapes[0], bench.device) if len(shapes) > 1 else None

        def ran(number: int, plan: Any, index: int = index) -> bool:
            return (index, number, built(plan, plans[index][number][0])) in good

        def fits(plan: Any, long: Long | None = long) -> bool:
            return long is None or not isinstance(plan, Shape) or long.keeps(plan)

        for stage, plan in zip(chain.stages, improved(chain, ran, fits, bench.left_s), strict=True):
            if stage.row is not None and (plan != stage.plans[0] or stage.name.startswith("experts")):
                rows.append(stage.row(plan))
    return [Tuned(op, merged(tuned.table(op, bench.device), found, SAME[op])) for op, found in joined(rows).items()]


SECTION = Section("single", (OP,), run)
