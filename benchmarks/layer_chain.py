"""Layers of a model as a step of some rows launches them, with what each launch's kernel may be: for `tune_layer`.

Every row is a sequence of CONTEXT tokens with pages of its own. Layers have weights, keys and values of their own, as
many layers as the model has or MOST_BYTES hold, so that all of it comes from memory as in a step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import tune_attention, tune_dense, tune_narrow
from benchmarks.moe import DOWN_TILES, UP_FEW, UP_TILES, few_downs
from benchmarks.narrow_work import stored, weight_bytes
from benchmarks.shapes import ModelShape
from benchmarks.tuning import Row, seconds
from services.worker.kernels import tuned
from services.worker.kernels.impl.triton import _dense, _moe_plan, _narrow_fused, _narrow_plan, moe_gated, norm_route
from services.worker.kernels.impl.triton._decode_attention import EARLY_ROWS, Shape, choose, launch
from services.worker.kernels.impl.triton._dense import APART, Plan
from services.worker.kernels.impl.triton._moe_plan import Experts, Few, Grouped, Tile
from services.worker.kernels.impl.triton.embedding import embedding_by_blocks
from services.worker.kernels.impl.triton.rope_kv_write import rope_kv_write_heads
from services.worker.kernels.ops.paged_attention import AttentionSpec
from services.worker.kernels.ops.rope_kv_write import HeadNorm

EPS, PAGE, CONTEXT, DTYPE = 1e-6, tune_attention.PAGE, 640, torch.bfloat16
MOST_BYTES = 8 << 30  # of weights, keys and values
SPAN_S = 0.04  # of a measurement: a replay is milliseconds, and what precedes the first of some is to be little of them
CHECKED = 4  # layers whose results are compared
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
    tables that say so; `kernel`: what is compiled for a plan; `around`: of a plan, others with the same kernel."""

    name: str
    plans: tuple[Any, ...]
    launch: Callable[[Any, int], None]
    kernel: Callable[[Any], Any]
    lines: Callable[[Any], list[Line]] | None = None
    around: Callable[[Any], Sequence[Any]] = lambda _: ()


def unique(plans: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(plans))


def likely(plans: Sequence[Any], held: Sequence[tuned.Row], names: Sequence[str], most: int) -> list[Any]:
    """Those whose geometry the tables chose most often for several rows: each kernel costs seconds to compile."""
    chosen = Counter(tuple(row[name] for name in names) for row in held if row["rows"] > 1 and names[0] in row)
    return sorted(plans, key=lambda plan: -chosen[tuple(getattr(plan, name) for name in names)])[:most]


class Chain:
    """`rows` rows' way through layers of a model, with weights of `form`, "" for bf16."""

    def __init__(self, model: ModelShape, form: str, rows: int, device: torch.device, layers: int = 0) -> None:
        self.model, self.form, self.rows, self.device = model, form, rows, device
        self.layers = layers or min(model.layers, max(3, math.ceil(MOST_BYTES / self.stored_bytes)))
        self.norm = self.random(model.hidden).abs() + 0.5
        self.table = self.random(max(4, rows), model.hidden)
        self.ids = torch.arange(rows, dtype=torch.int32, device=device)
        self.x, self.qkv = self.random(rows, model.hidden), self.random(rows, model.qkv_width)
        self.q = self.random(rows, model.heads, model.head_dim)
        self.attended, self.gated = self.random(rows, model.q_width), self.random(rows, model.inner)
        self.held: list[tuple[Tensor, Tensor]] | None = None  # each layer's routing, where results are compared
        self.first_held: list[tuple[Tensor, Tensor]] = []
        self.stages = tuple(self._stages())

    def _weight_bytes(self, elements: float) -> float:
        return weight_bytes(self.form.removesuffix("z"), elements) if self.form else 2 * elements

    @property
    def _kv_bytes(self) -> int:
        return 2 * self.rows * CONTEXT * self.model.kv_elements

    @property
    def stored_bytes(self) -> float:
        """Of a layer."""
        return self._weight_bytes(self.model.layer_weights) + self._kv_bytes

    @property
    def read_bytes(self) -> float:
        """Of a layer in a step, at least: weights of the experts that random routers reach, keys and values."""
        m = self.model
        elements = float(m.layer_weights)
        if m.experts:
            elements -= 3 * m.hidden * m.inner * m.experts * (1 - m.top_k / m.experts) ** self.rows
        return self._weight_bytes(elements) + self._kv_bytes

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=self.device).normal_(0, scale)

    def run(self, plans: tuple[Any, ...], layers: int = 0, without: int = -1) -> Tensor:
        """`without`: the number of a stage that is left out."""
        self.x = embedding_by_blocks(self.ids, self.table)
        for layer in range(layers or self.layers):
            for number, (stage, plan) in enumerate(zip(self.stages, plans, strict=True)):
                if number != without:
                    stage.launch(plan, layer)
        return self.x

    def result(self, plans: tuple[Any, ...]) -> list[Tensor]:
        """What launches leave, each by itself, after some layers with the routing of the first call: a rounding
        otherwise changes a token's experts."""
        self.held = self.first_held
        self.run(plans, min(self.layers, CHECKED))
        self.held = None
        return [each.clone() for each in (self.x, self.qkv, self.q, self.attended, self.gated)]

    def time(self, plans: tuple[Any, ...], without: int = -1) -> float:
        """Seconds of a layer."""
        return seconds([lambda: self.run(plans, without=without)], SPAN_S) / self.layers

    def _stages(self) -> Iterator[Stage]:
        m = self.model
        yield self._product("norm_linear", m.qkv_width, m.hidden, "x", "qkv")
        yield from self._attention()
        yield self._product("add_linear", m.hidden, m.q_width, "attended", "x")
        if m.experts:
            yield from self._experts()
            return
        yield self._product("norm_gated_linear", 2 * m.inner, m.hidden, "x", "gated")
        yield self._product("add_linear", m.hidden, m.inner, "gated", "x")

    def _product(self, op: str, out: int, inner: int, source: str, target: str) -> Stage:
        """From one attribute to another, which an "add_linear" adds to. `out`: weight rows."""
        if self.form:
            return self._narrow(op, out, inner, source, target)
        limit = _dense.bucket(self.rows)
        assert limit == self.rows or self.rows == 1, "a choice is for a bucket of rows"
        weights = [self.random(out, inner, scale=inner**-0.5) for _ in range(self.layers)]

        def launched(way: Way, layer: int) -> None:
            residual = self.x if op == "add_linear" else None
            x = getattr(self, source)
            setattr(self, target, tune_dense.by_plan(op, x, self.norm, weights[layer], residual, *way))

        def kernel(way: Way) -> Any:
            return ("linear", limit, inner, way.plain) if way.plan == APART else (op, limit, inner, way.plan)

        def lines(way: Way) -> list[Line]:
            asked: Row = {"rows": limit, "out": out, "in": inner}
            if way.plan != APART:
                return [(op, asked | way.plan._asdict())]
            plain = way.plain._asdict() if way.plain != APART else {"path": APART.path}
            own = [(op, asked | {"path": APART.path})]
            return own if op == "add_linear" else [*own, ("linear", asked | plain)]

        return Stage(f"{op} {out}x{inner}", self._ways(op, limit, out, inner), launched, kernel, lines)

    def _ways(self, op: str, limit: int, out: int, inner: int) -> tuple[Way, ...]:
        device = _dense.describe(self.device)
        held = [row for each in tune_dense.OPS for row in tuned.table(each, self.device)]
        apart = limit > 1 and op != "add_linear"

        def some(of: str) -> list[Plan]:
            plans = tune_dense.candidates(tune_dense.Job(of, limit, out, inner), device)
            if limit == 1:
                return plans
            names = [name for name in Plan._fields if name not in ("path", "depth")]
            found = likely(plans, held, names, LIKELY)
            ahead = [plan._replace(depth=0 if plan.depth else plan.stages - 1) for plan in found[:DEEP]]
            return unique([*found, *ahead])  # type: ignore[return-value]

        first = Way(_dense.plan(op, limit, out, inner, DTYPE, self.device))
        if apart and first.plan == APART:
            first = Way(APART, _dense.plan("linear", limit, out, inner, DTYPE, self.device))
        ways = [first, *([Way(APART)] if limit > 1 else ())]
        pairs = [[Way(plan) for plan in some(op)], [Way(APART, plan) for plan in some("linear")] if apart else []]
        for index in range(max(map(len, pairs))):  # in turn: time may end before all are compiled
            ways += [found[index] for found in reversed(pairs) if index < len(found)]
        return unique(ways)

    def _narrow(self, op: str, rows: int, inner: int, source: str, target: str) -> Stage:
        gated, norm = op == "norm_gated_linear", None if op == "add_linear" else (self.norm, EPS)
        out, activation = rows // 2 if gated else rows, "silu" if gated else ""
        form = self.form.removesuffix("z")
        narrows = [_narrow_fused.narrow_of(*stored(form, rows, inner)) for _ in range(self.layers)]

        def launched(plan: Any, layer: int) -> None:
            inputs = _narrow_fused.entered(getattr(self, source), norm, narrows[layer], None, True)
            result = self.x
            if op != "add_linear":
                result = torch.empty((self.rows, out), dtype=DTYPE, device=self.device)
            _narrow_plan.product(inputs, narrows[layer], result, op == "add_linear", activation, plan)
            setattr(self, target, result)

        rounded = tune_narrow.ways(self.form, self.rows)[0]
        normed = norm is not None and self.rows <= _narrow_fused.NORMED
        job = tune_narrow.Job(self.form, rounded, self.rows, out, inner, gated, normed)
        asked = tune_narrow.asked(job, self.rows)
        told: Row = dict(zip(_narrow_plan.ASKED, asked, strict=True))
        others = tune_narrow.candidates(job, _dense.describe(self.device))
        if self.rows > 1:
            held = tuned.table("narrow", self.device)
            others = likely(others, held, ("block_n", "block_k", "warps", "stages", "parts"), LIKELY)
        return Stage(
            f"{self.form} {rows}x{inner}",
            unique([_narrow_plan.choose(*asked, self.device), *others]),
            launched,
            lambda plan: (op, self.form, self.rows, inner, plan),
            lambda plan: [("narrow", told | plan._asdict())],
        )

    def _attention(self) -> Iterator[Stage]:
        m, width, rows = self.model, CONTEXT // PAGE, self.rows
        caches = [self.random(2, rows * width, PAGE, m.kv_heads, m.head_dim) for _ in range(self.layers)]
        for cache in caches:
            cache[1].mul_(VALUES)
        angles = self.random(2, rows, m.head_dim)
        tables = torch.randperm(rows * width, device=self.device).view(rows, width).to(torch.int32)
        slots = tables[:, -1].to(torch.int64) * PAGE + (CONTEXT - 1) % PAGE
        lengths = tune_attention.make_rows([CONTEXT] * rows, tables)
        head_norm = HeadNorm(self.random(m.head_dim), self.random(m.head_dim), EPS) if m.qk_norm else None
        spec = AttentionSpec(m.head_dim**-0.5)

        def rope(_: Any, layer: int) -> None:
            k_cache, v_cache = caches[layer].unbind(0)
            self.q = rope_kv_write_heads(self.qkv, angles[0], angles[1], k_cache, v_cache, slots, head_norm, None)

        def attend(shape: Shape, layer: int) -> None:
            out = torch.empty_like(self.q)
            launch(self.q, out, caches[layer][0], caches[layer][1], lengths, spec, shape)
            self.attended = out.view(rows, m.q_width)

        yield Stage("rope_kv_write", (None,), rope, lambda _: ("rope_kv_write", rows))
        yield self._attended(attend)

    def _attended(self, attend: Callable[[Shape, int], None]) -> Stage:
        m, rows = self.model, self.rows
        share = m.heads // m.kv_heads
        first = choose(self.device, DTYPE, DTYPE, rows, share, m.kv_heads, m.head_dim)
        shapes = [first]
        if not self.form:  # the others' tables are the same
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
            lambda shape: () if self.form else [shape._replace(waves=w, least=n) for w in WAVES for n in LEAST],
        )

    def _experts(self) -> Iterator[Stage]:
        m, rows = self.model, self.rows
        routers = [self.random(m.experts, m.hidden, scale=m.hidden**-0.5) for _ in range(self.layers)]
        ids = torch.rand(rows, m.experts, device=self.device).topk(m.top_k).indices.to(torch.int32)
        self.routed = self.random(rows, m.hidden), torch.full(ids.shape, 1 / m.top_k, device=self.device), ids

        def route(geometry: tuple[int, int] | None, layer: int) -> None:
            arguments = (self.x, self.norm, EPS, routers[layer], None, m.top_k, True)
            self.routed = norm_route.run_few(*arguments, *geometry) if geometry else norm_route.run(*arguments)
            if self.held is not None:
                if len(self.held) == layer:
                    self.held.append(self.routed[1:])
                self.routed = self.routed[0], *self.held[layer]

        routes = unique([(norm_route.ROWS, norm_route.WARPS), *ROUTES]) if rows == 1 else (None,)
        yield Stage("norm_route", routes, route, lambda geometry: ("norm_route", rows, geometry))
        shape = Experts(m.experts, m.top_k, m.hidden, m.inner)
        gate_up = [self.random(m.experts, 2 * m.inner, m.hidden, scale=m.hidden**-0.5) for _ in range(self.layers)]
        down = [self.random(m.experts, m.hidden, m.inner, scale=m.inner**-0.5) for _ in range(self.layers)]
        plan = _moe_plan.choose(shape, rows, self.device, DTYPE)
        told: Row = dict(zip(ASKED["moe_gated"], (*shape, rows), strict=True))
        yield from (self._few if isinstance(plan, Few) else self._grouped)(plan, told, gate_up, down)  # type: ignore[arg-type]

    def _few(self, first: Few, told: Row, gate_up: list[Tensor], down: list[Tensor]) -> Iterator[Stage]:
        m = self.model
        self.gated = self.random(self.rows * m.top_k, m.inner)

        def up(plan: Few, layer: int) -> None:
            self.gated = moe_gated.few_up(plan, self.routed[0], self.routed[2], gate_up[layer])

        def out(plan: Few, layer: int) -> None:
            moe_gated.few_down(plan, self.gated, self.routed[1], self.routed[2], down[layer], self.x)

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
        )
        yield Stage(
            "experts down",
            unique(downs),
            out,
            lambda plan: (*kernel, plan[3:]),
            lambda plan: [("moe_gated", told | {"few": [*plan[3:]]})],
        )

    def _grouped(self, first: Grouped, told: Row, gate_up: list[Tensor], down: list[Tensor]) -> Iterator[Stage]:
        """With the sort ahead of the first product, and the weighted sum behind the second."""
        m, block_m = self.model, first.block_m
        self.gated = self.random(self.rows * m.top_k, m.inner)
        ordered: list[moe_gated.Sorted] = []

        def up(tile: Tile, layer: int) -> None:
            ordered[:] = [moe_gated.Sorted(self.routed[2], m.experts, block_m)]
            self.gated = moe_gated.grouped_up(tile, block_m, ordered[0], self.routed[0], m.top_k, gate_up[layer])

        def out(tile: Tile, layer: int) -> None:
            if not ordered:  # launched alone, to be compiled
                ordered.append(moe_gated.Sorted(self.routed[2], m.experts, block_m))
            pairs = moe_gated.grouped_down(tile, block_m, ordered[0], self.gated, down[layer])
            moe_gated.combine(pairs, self.routed[1], self.x)

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
