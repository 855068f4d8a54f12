"""The launches of a layer as a step of some rows has them, and what each one's kernel may be: for `layer_chain`.

Products by the ops' own functions, fused or apart from norm and gate, and with weights of 8 and 4 bits; attention over
sequences of CONTEXT tokens with pages of their own; experts without sorting or grouped, as the table has it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import tune_attention, tune_dense, tune_narrow
from benchmarks.moe import DOWN_TILES, UP_FEW, UP_TILES, few_downs
from benchmarks.narrow_work import stored
from benchmarks.shapes import ModelShape
from benchmarks.tuning import Row
from services.worker.kernels import tuned
from services.worker.kernels.impl.triton import _dense, _moe_plan, _narrow_fused, _narrow_plan, moe_gated, norm_route
from services.worker.kernels.impl.triton._decode_attention import EARLY_ROWS, Shape, choose, launch
from services.worker.kernels.impl.triton._dense import APART, Plan
from services.worker.kernels.impl.triton._moe_plan import Experts, Few, Grouped, Tile
from services.worker.kernels.impl.triton._moe_sort import Sorted
from services.worker.kernels.impl.triton.rope_kv_write import rope_kv_write_heads
from services.worker.kernels.ops.paged_attention import AttentionSpec
from services.worker.kernels.ops.rope_kv_write import HeadNorm

EPS, PAGE, CONTEXT, DTYPE = 1e-6, tune_attention.PAGE, 640, torch.bfloat16
VALUES = 16.0  # so much larger than keys: what attention adds to x is then as large as x
LIKELY = 6  # candidates of a product, and as many of the product alone where norm and gate may be apart
DEEP = 2  # of these, the first so many also with their first tiles requested ahead, or not
GEOMETRY = (  # block_kv, warps, stages of attention
    (64, 4, 2), (32, 2, 4), (64, 4, 4), (128, 8, 3), (64, 4, 3), (32, 4, 4), (128, 4, 2), (128, 8, 2),
)  # fmt: skip
SINGLE = (  # the same of one row
    (32, 2, 4), (32, 2, 1), (32, 4, 1), (32, 1, 1), (64, 2, 2), (64, 2, 1), (64, 4, 1), (128, 4, 1),
)  # fmt: skip
WAVES, LEAST = (0.5, 1.0, 2.0, 4.0), (1, 2, 4)
ROUTES = ((4, 4), (4, 2), (2, 2), (2, 1), (1, 1), (8, 4), (2, 4))  # rows, warps of norm_route for one token
ASKED = {"paged_attention": ("rows", "kv_heads", "share", "head_dim", "kv_bytes"), "narrow": _narrow_plan.ASKED}
ASKED |= dict.fromkeys(tune_dense.OPS, tune_dense.ASKED)  # what a line of a table is for
ASKED["moe_gated"] = ("num_experts", "top_k", "hidden", "inner", "tokens")
Line = tuple[str, Row]


class Way(NamedTuple):
    """A dense product's choice; `plain`: the product's own, where `plan` is "apart" from norm and gate."""

    plan: Plan
    plain: Plan = APART


class Stage(NamedTuple):
    """Some launches of a layer. `plans`: the tables' choice first; `launch`: by a plan in a layer; `lines`: of the
    tables that say so; `kernel`: what is compiled for a plan; `around`: of a plan, others with the same kernel;
    `relied_on`: the next launch must come right behind it, since it reads what is older without waiting."""

    name: str
    plans: tuple[Any, ...]
    launch: Callable[[Any, int], None]
    kernel: Callable[[Any], Any]
    lines: Callable[[Any], list[Line]] | None = None
    around: Callable[[Any], Sequence[Any]] = lambda _: ()
    relied_on: bool = False


def unique(plans: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(plans))


def likely(plans: Sequence[Any], held: Sequence[tuned.Row], names: Sequence[str], most: int) -> list[Any]:
    """Those whose geometry the tables chose most often for several rows: each kernel costs seconds to compile."""
    chosen = Counter(tuple(row[name] for name in names) for row in held if row["rows"] > 1 and names[0] in row)
    return sorted(plans, key=lambda plan: -chosen[tuple(getattr(plan, name) for name in names)])[:most]


class Flow:
    """What a launch leaves to the next, of `rows` rows in layers with weights of `form`, "" for bf16."""

    def __init__(self, model: ModelShape, form: str, rows: int, device: torch.device, layers: int) -> None:
        self.model, self.form, self.rows, self.device, self.layers = model, form, rows, device, layers
        self.norm = self.random(model.hidden).abs() + 0.5
        self.x, self.qkv = self.random(rows, model.hidden), self.random(rows, model.qkv_width)
        self.q = self.random(rows, model.heads, model.head_dim)
        self.attended, self.gated = self.random(rows, model.q_width), self.random(rows, model.inner)
        ids = torch.rand(rows, max(1, model.experts), device=device).topk(model.top_k).indices.to(torch.int32)
        # x normed; weights and ids of experts
        self.routed = self.x, torch.full(ids.shape, 1 / max(1, model.top_k), device=device), ids
        self.held: list[tuple[Tensor, Tensor]] | None = None  # each layer's routing, in place of the router's
        self.filled: Callable[[], Tensor] = lambda: self.gated  # its rows that a launch has written

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=self.device).normal_(0, scale)


def product(flow: Flow, op: str, out: int, inner: int, source: str, target: str) -> Stage:
    """From one of the flow's tensors to another, which an "add_linear" adds to. `out`: weight rows."""
    if flow.form:
        return _narrow(flow, op, out, inner, source, target)
    limit = _dense.bucket(flow.rows)
    assert limit == flow.rows or flow.rows == 1, "a choice is for a bucket of rows"
    weights = [flow.random(out, inner, scale=inner**-0.5) for _ in range(flow.layers)]

    def launched(way: Way, layer: int) -> None:
        residual = flow.x if op == "add_linear" else None
        x = getattr(flow, source)
        setattr(flow, target, tune_dense.by_plan(op, x, flow.norm, weights[layer], residual, *way))

    def kernel(way: Way) -> Any:
        return ("linear", limit, inner, way.plain) if way.plan == APART else (op, limit, inner, way.plan)

    def lines(way: Way) -> list[Line]:
        asked: Row = {"rows": limit, "out": out, "in": inner}
        if way.plan != APART:
            return [(op, asked | way.plan._asdict())]
        plain = way.plain._asdict() if way.plain != APART else {"path": APART.path}
        own = [(op, asked | {"path": APART.path})]
        return own if op == "add_linear" else [*own, ("linear", asked | plain)]

    return Stage(f"{op} {out}x{inner}", _ways(flow, op, limit, out, inner), launched, kernel, lines)


def _ways(flow: Flow, op: str, limit: int, out: int, inner: int) -> tuple[Way, ...]:
    device = _dense.describe(flow.device)
    held = [row for each in tune_dense.OPS for row in tuned.table(each, flow.device)]
    apart = limit > 1 and op != "add_linear"

    def some(of: str) -> list[Plan]:
        plans = tune_dense.candidates(tune_dense.Job(of, limit, out, inner), device)
        if limit == 1:
            return plans
        names = [name for name in Plan._fields if name not in ("path", "depth")]
        found = likely(plans, held, names, LIKELY)
        ahead = [plan._replace(depth=0 if plan.depth else plan.stages - 1) for plan in found[:DEEP]]
        return unique([*found, *ahead])  # type: ignore[return-value]

    first = Way(_dense.plan(op, limit, out, inner, DTYPE, flow.device))
    if apart and first.plan == APART:
        first = Way(APART, _dense.plan("linear", limit, out, inner, DTYPE, flow.device))
    ways = [first, *([Way(APART)] if limit > 1 else ())]
    pairs = [[Way(plan) for plan in some(op)], [Way(APART, plan) for plan in some("linear")] if apart else []]
    for index in range(max(map(len, pairs))):  # in turn: time may end before all are compiled
        ways += [found[index] for found in reversed(pairs) if index < len(found)]
    return unique(ways)


def _narrow(flow: Flow, op: str, rows: int, inner: int, source: str, target: str) -> Stage:
    gated, norm = op == "norm_gated_linear", None if op == "add_linear" else (flow.norm, EPS)
    out, activation = rows // 2 if gated else rows, "silu" if gated else ""
    form = flow.form.removesuffix("z")
    narrows = [_narrow_fused.narrow_of(*stored(form, rows, inner)) for _ in range(flow.layers)]

    def launched(plan: Any, layer: int) -> None:
        inputs = _narrow_fused.entered(getattr(flow, source), norm, narrows[layer], None)
        result = flow.x
        if op != "add_linear":
            result = torch.empty((flow.rows, out), dtype=DTYPE, device=flow.device)
        _narrow_plan.product(inputs, narrows[layer], result, op == "add_linear", activation, plan)
        setattr(flow, target, result)

    rounded = tune_narrow.ways(flow.form, flow.rows)[0]
    normed = norm is not None and not rounded
    job = tune_narrow.Job(flow.form, rounded, flow.rows, out, inner, gated, normed)
    asked = tune_narrow.asked(job, flow.rows)
    told: Row = dict(zip(_narrow_plan.ASKED, asked, strict=True))
    others = tune_narrow.candidates(job, _dense.describe(flow.device))
    if flow.rows > 1:
        held = tuned.table("narrow", flow.device)
        others = likely(others, held, ("block_n", "block_k", "warps", "stages", "parts"), LIKELY)
    return Stage(
        f"{flow.form} {rows}x{inner}",
        unique([_narrow_plan.choose(*asked, flow.device), *others]),
        launched,
        lambda plan: (op, flow.form, flow.rows, inner, plan),
        lambda plan: [("narrow", told | plan._asdict())],
    )


def attention(flow: Flow) -> Iterator[Stage]:
    """Rotation and writing of keys and values, then attention."""
    m, width, rows = flow.model, CONTEXT // PAGE, flow.rows
    caches = [flow.random(2, rows * width, PAGE, m.kv_heads, m.head_dim) for _ in range(flow.layers)]
    for cache in caches:
        cache[1].mul_(VALUES)
    angles = flow.random(2, rows, m.head_dim)
    tables = torch.randperm(rows * width, device=flow.device).view(rows, width).to(torch.int32)
    slots = tables[:, -1].to(torch.int64) * PAGE + (CONTEXT - 1) % PAGE
    lengths = tune_attention.make_rows([CONTEXT] * rows, tables)
    head_norm = HeadNorm(flow.random(m.head_dim), flow.random(m.head_dim), EPS) if m.qk_norm else None
    spec = AttentionSpec(m.head_dim**-0.5)

    def rope(_: Any, layer: int) -> None:
        k_cache, v_cache = caches[layer].unbind(0)
        flow.q = rope_kv_write_heads(flow.qkv, angles[0], angles[1], k_cache, v_cache, slots, head_norm, None)

    def attend(shape: Shape, layer: int) -> None:
        out = torch.empty_like(flow.q)
        launch(flow.q, out, caches[layer][0], caches[layer][1], lengths, spec, shape)
        flow.attended = out.view(rows, m.q_width)

    yield Stage("rope_kv_write", (None,), rope, lambda _: ("rope_kv_write", rows))
    yield _attended(flow, attend)


def _attended(flow: Flow, attend: Callable[[Shape, int], None]) -> Stage:
    m, rows = flow.model, flow.rows
    share = m.heads // m.kv_heads
    first = choose(flow.device, DTYPE, DTYPE, rows, share, m.kv_heads, m.head_dim)
    shapes = [first]
    if not flow.form:  # the others' tables are the same
        geometry = SINGLE if rows == 1 else GEOMETRY
        early = (True, False) if rows <= EARLY_ROWS else (False,)
        shapes += [Shape(*g, first.waves, first.fused, first.least, e) for g in geometry for e in early]
        shapes.append(first._replace(fused=not first.fused))
        if early == (False,) and rows <= 16:
            shapes += [shape._replace(early=True) for shape in (first, *shapes[1:3])]
    told: Row = dict(zip(ASKED["paged_attention"], (rows, m.kv_heads, share, m.head_dim, 2), strict=True))
    return Stage(
        "paged_attention",
        unique(shapes),
        attend,
        lambda shape: ("attention", rows, m.heads, m.kv_heads, m.head_dim, shape._replace(waves=0.0, least=0)),
        lambda shape: [("paged_attention", told | shape._asdict())],
        lambda shape: () if flow.form else [shape._replace(waves=w, least=n) for w in WAVES for n in LEAST],
    )


def experts(flow: Flow) -> Iterator[Stage]:
    """The router, then both products."""
    m, rows = flow.model, flow.rows
    routers = [flow.random(m.experts, m.hidden, scale=m.hidden**-0.5) for _ in range(flow.layers)]

    def route(geometry: tuple[int, int] | None, layer: int) -> None:
        arguments = (flow.x, flow.norm, EPS, routers[layer], None, m.top_k, True)
        flow.routed = norm_route.run_few(*arguments, *geometry) if geometry else norm_route.run(*arguments)
        if flow.held is not None:
            if len(flow.held) == layer:
                flow.held.append(flow.routed[1:])
            flow.routed = flow.routed[0], *flow.held[layer]

    routes = unique([(norm_route.ROWS, norm_route.WARPS), *ROUTES]) if rows == 1 else (None,)
    yield Stage("norm_route", routes, route, lambda geometry: ("norm_route", rows, geometry))
    shape = Experts(m.experts, m.top_k, m.hidden, m.inner)
    gate_up = [flow.random(m.experts, 2 * m.inner, m.hidden, scale=m.hidden**-0.5) for _ in range(flow.layers)]
    down = [flow.random(m.experts, m.hidden, m.inner, scale=m.inner**-0.5) for _ in range(flow.layers)]
    plan = _moe_plan.choose(shape, rows, flow.device, DTYPE)
    told: Row = dict(zip(ASKED["moe_gated"], (*shape, rows), strict=True))
    yield from (_few if isinstance(plan, Few) else _grouped)(flow, plan, told, gate_up, down)  # type: ignore[arg-type]


def _few(flow: Flow, first: Few, told: Row, gate_up: list[Tensor], down: list[Tensor]) -> Iterator[Stage]:
    m = flow.model
    flow.gated = flow.random(flow.rows * m.top_k, m.inner)

    def up(plan: Few, layer: int) -> None:
        flow.gated = moe_gated.few_up(plan, flow.routed[0], flow.routed[2], gate_up[layer])

    def out(plan: Few, layer: int) -> None:
        moe_gated.few_down(plan, flow.gated, flow.routed[1], flow.routed[2], down[layer], flow.x)

    names = ("down_rows", "down_chunk", "down_warps", "down_experts")
    ups = [first, *(first._replace(up_rows=r, up_chunk=c, up_warps=w) for r, c, w in UP_FEW)]
    others = few_downs(Experts(m.experts, m.top_k, m.hidden, m.inner))
    downs = [first, *(first._replace(**dict(zip(names, each, strict=True))) for each in others)]
    kernel = ("few", m.hidden, m.inner)
    yield Stage(
        "experts up",
        unique(ups),
        up,
        lambda plan: (*kernel, plan[:3]),
        lambda plan: [("moe_gated", told | {"few": [*plan[:3]]})],
        relied_on=True,
    )
    yield Stage(
        "experts down",
        unique(downs),
        out,
        lambda plan: (*kernel, plan[3:]),
        lambda plan: [("moe_gated", told | {"few": [*plan[3:]]})],
    )


def places(ordered: Sorted, block_m: int) -> Tensor:
    """Those of the blocks that have a pair."""
    ids = ordered.plan[ordered.ids_start :][: int(ordered.plan[0]) * block_m]
    return (ids < ordered.num_pairs).nonzero().flatten()


def _grouped(flow: Flow, first: Grouped, told: Row, gate_up: list[Tensor], down: list[Tensor]) -> Iterator[Stage]:
    """With the sort ahead of the first product, and the weighted sum behind the second."""
    m, block_m = flow.model, first.block_m
    ordered: list[Sorted] = []
    flow.filled = lambda: flow.gated[places(ordered[0], block_m)]

    def up(tile: Tile, layer: int) -> None:
        ordered[:] = [Sorted(flow.routed[2], m.experts, block_m)]
        flow.gated = moe_gated.grouped_up(tile, block_m, ordered[0], flow.routed[0], m.top_k, gate_up[layer])

    def out(tile: Tile, layer: int) -> None:
        if not ordered:  # launched alone, to be compiled
            ordered.append(Sorted(flow.routed[2], m.experts, block_m))
            flow.gated = flow.random(ordered[0].max_blocks * block_m, m.inner)
        pairs = moe_gated.grouped_down(tile, block_m, ordered[0], flow.gated, down[layer])
        moe_gated.combine(pairs, flow.routed[1], flow.x)

    for name, launched, own, tiles in (
        ("up", up, first.up, UP_TILES), ("down", out, first.down, DOWN_TILES),
    ):  # fmt: skip
        yield Stage(
            f"experts {name}",
            unique([own, *(Tile(*each) for each in tiles.get(block_m, ()))]),
            launched,
            lambda tile, name=name: (name, block_m, m.hidden, m.inner, tile),  # type: ignore[misc]
            lambda tile, name=name: [("moe_gated", told | {"block_m": block_m, name: [*tile]})],  # type: ignore[misc]
        )
