"""What each op does in the three models: arguments on the device, the floor's bytes and operations, torch's best way.

Bytes count each input once and each output once, weights of experts only where a token is routed to them. Callers:
benchmarks/kernels.py.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.shapes import ModelShape
from services.worker.kernels.ops.paged_attention import AttentionSpec, make_attention_rows
from services.worker.kernels.ops.rope_kv_write import HeadNorm

DEVICE = "cuda"
DTYPE = torch.bfloat16
CONTEXT = 640  # KV positions of a decode row: a prompt of 512 and half of 256 outputs
PROMPT = 2048  # tokens of each prompt of a prefill step
MOST_ROWS = 512  # of a decode step; with more tokens it is a prefill step
BLOCK_TOKENS = 16
EPS = 1e-6

Run = Callable[..., Any]
grouped_mm: Run = getattr(functional, "grouped_mm", None) or torch._grouped_mm


@dataclass(frozen=True)
class Work:
    """One call of an op. `make` gives fresh arguments each time; the floor is that of the device's ceilings."""

    op: str
    label: str  # which use of the op in the model
    model: ModelShape
    tokens: int
    make: Callable[[], tuple[Any, ...]]
    num_bytes: int
    flops: int = 0
    torch_best: Run | None = None  # takes the same arguments; None: the op's meaning
    prepare: Callable[..., tuple[Any, ...]] | None = None  # arguments for torch_best, where they differ
    per_step: int = 0  # calls in a decode step

    @property
    def key(self) -> str:
        return f"{self.op} {self.label} {self.model.name} {self.tokens}"


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE).mul_(scale)


def matrix(out_features: int, in_features: int) -> Tensor:
    return random(out_features, in_features, scale=in_features**-0.5)


def dense_bytes(tokens: int, in_features: int, out_features: int, written: int) -> int:
    return 2 * (in_features * out_features + tokens * (in_features + written))


def _norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(functional.rms_norm(x, norm.shape, norm, eps), weight, bias)


def _add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return residual.addmm_(x, weight.T)


def _gated(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    gate, up = _norm_linear(x, norm, eps, weight, bias).chunk(2, -1)
    return functional.silu(gate).mul_(up)


def projection(op: str, label: str, model: ModelShape, tokens: int, widths: tuple[int, int], per_step: int) -> Work:
    """norm_linear or add_linear. widths: in and out features."""
    m, t = model, tokens
    in_features, out_features = widths
    is_add = op == "add_linear"

    def make() -> tuple[Any, ...]:
        weight = matrix(out_features, in_features)
        if is_add:
            return random(t, out_features), random(t, in_features), weight, None
        return random(t, in_features), random(in_features), EPS, weight, None

    num_bytes = dense_bytes(t, in_features, out_features, out_features * (2 if is_add else 1))
    flops, best = 2 * t * in_features * out_features, _add_linear if is_add else _norm_linear
    return Work(op, label, m, t, make, num_bytes, flops, best, per_step=per_step)


def dense(model: ModelShape, tokens: int) -> Iterator[Work]:
    """The projections of a layer, and the head for each row."""
    m, t = model, tokens
    yield projection("norm_linear", "qkv", m, t, (m.hidden, m.qkv_width), m.layers)
    yield projection("add_linear", "o", m, t, (m.q_width, m.hidden), m.layers)
    if t <= MOST_ROWS:
        yield projection("norm_linear", "head", m, t, (m.hidden, m.vocab), 1)
    if m.experts:
        return
    yield projection("add_linear", "down", m, t, (m.inner, m.hidden), m.layers)
    yield Work(
        "norm_gated_linear",
        "gate_up",
        m,
        t,
        lambda: (random(t, m.hidden), random(m.hidden), EPS, matrix(2 * m.inner, m.hidden), None, "silu"),
        dense_bytes(t, m.hidden, 2 * m.inner, m.inner),
        4 * t * m.hidden * m.inner,
        _gated,
        per_step=m.layers,
    )


def pool_blocks(tokens: int) -> int:
    """Blocks that the rows of a step have."""
    rows, context = rows_of(tokens)
    return rows * math.ceil(context / BLOCK_TOKENS)


def rows_of(tokens: int) -> tuple[int, int]:
    """(rows, KV positions of each): prompts from the start for a prefill step, else decode rows."""
    return (tokens // PROMPT, PROMPT) if tokens > MOST_ROWS else (tokens, CONTEXT)


def caches(model: ModelShape, tokens: int) -> Tensor:
    return random(2, pool_blocks(tokens), BLOCK_TOKENS, model.kv_heads, model.head_dim)


def attention(model: ModelShape, tokens: int) -> Iterator[Work]:
    """Rotation with the cache's writes, and attention over scattered blocks."""
    m, t = model, tokens
    rows, context = rows_of(t)
    is_decode = rows == t

    def make_rope() -> tuple[Any, ...]:
        cache = caches(m, t)
        angle = torch.rand(t, 1, m.head_dim // 2, device=DEVICE) * 6.28
        cos, sin = torch.cat((angle.cos(),) * 2, -1).to(DTYPE), torch.cat((-angle.sin(), angle.sin()), -1).to(DTYPE)
        slots = torch.randperm(pool_blocks(t) * BLOCK_TOKENS, device=DEVICE)[:t]
        norm = HeadNorm(random(m.head_dim), random(m.head_dim), EPS) if m.qk_norm else None
        return random(t, m.qkv_width), cos, sin, cache[0], cache[1], slots, norm, None

    yield Work(
        "rope_kv_write", "", m, t, make_rope, 2 * t * (2 * m.qkv_width + 2 * m.head_dim) + 8 * t, per_step=m.layers
    )

    def make_attention() -> tuple[Any, ...]:
        cache = caches(m, t)
        per_row = pool_blocks(t) // rows
        tables = torch.randperm(pool_blocks(t)).view(rows, per_row).tolist()
        plan = make_attention_rows([t // rows] * rows, [context] * rows, tables, BLOCK_TOKENS)
        plan = replace(
            plan,
            query_starts=plan.query_starts.to(DEVICE),
            context_lens=plan.context_lens.to(DEVICE),
            block_tables=plan.block_tables.to(DEVICE),
        )
        return random(t, m.heads, m.head_dim), cache[0], cache[1], plan, AttentionSpec(m.head_dim**-0.5)

    def contiguous(q: Tensor, k: Tensor, v: Tensor, plan: Any, spec: AttentionSpec) -> tuple[Any, ...]:
        """The same context in one piece, which is the best that torch can have."""
        blocks = plan.block_tables.flatten().long()
        shape = (rows, context, m.kv_heads, m.head_dim)
        k, v = (cache.index_select(0, blocks).view(shape).transpose(1, 2) for cache in (k, v))
        return q.view(rows, t // rows, m.heads, m.head_dim).transpose(1, 2), k, v

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=not is_decode, enable_gqa=True)

    pairs = rows * (context if is_decode else context * (context + 1) // 2)
    yield Work(
        "paged_attention",
        "decode" if is_decode else "prefill",
        m,
        t,
        make_attention,
        2 * rows * context * m.kv_elements + 4 * t * m.q_width,
        4 * pairs * m.q_width,
        sdpa,
        contiguous,
        per_step=m.layers,
    )


def norms_and_gates(model: ModelShape, tokens: int) -> Iterator[Work]:
    """What runs apart where the fused forms do not apply."""
    m, t = model, tokens
    yield Work(
        "rms_norm",
        "",
        m,
        t,
        lambda: (random(t, m.hidden), random(m.hidden), EPS),
        4 * t * m.hidden,
        torch_best=lambda x, weight, eps: functional.rms_norm(x, weight.shape, weight, eps),
    )
    yield Work(
        "add_rms_norm",
        "",
        m,
        t,
        lambda: (random(t, m.hidden), random(t, m.hidden), random(m.hidden), EPS),
        8 * t * m.hidden,
    )
    for op in ("silu_and_mul", "gelu_and_mul"):
        if not m.experts:
            yield Work(op, "", m, t, lambda: (random(t, 2 * m.inner),), 6 * t * m.inner)


def experts(model: ModelShape, tokens: int) -> Iterator[Work]:
    m, t = model, tokens
    if not m.experts:
        return

    def route() -> tuple[Tensor, Tensor]:
        weights, chosen = torch.randn(t, m.experts, device=DEVICE).softmax(-1).topk(m.top_k, -1)
        return weights, chosen.to(torch.int32)

    def make() -> tuple[Any, ...]:
        gate_up = random(m.experts, 2 * m.inner, m.hidden, scale=m.hidden**-0.5)
        down = random(m.experts, m.hidden, m.inner, scale=m.inner**-0.5)
        return random(t, m.hidden), *route(), gate_up, down, random(t, m.hidden)

    def grouped(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor) -> Tensor:
        """Tokens sorted by expert, torch's grouped product twice."""
        by_expert, order = chosen.flatten().sort()
        every = torch.arange(m.experts, dtype=torch.int32, device=DEVICE)
        ends = torch.searchsorted(by_expert, every, right=True, out_int32=True)
        places = order // m.top_k
        gate, up = grouped_mm(x[places], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        out = grouped_mm(functional.silu(gate).mul_(up), down.transpose(1, 2), offs=ends)
        return residual.index_add_(0, places, out * weights.flatten()[order, None].to(out.dtype))

    # distinct experts that t tokens reach: expected, for even routing
    reached = m.experts * (1 - (1 - m.top_k / m.experts) ** t)
    yield Work(
        "moe_gated",
        "",
        m,
        t,
        make,
        int(2 * reached * 3 * m.inner * m.hidden) + 6 * t * m.hidden,
        6 * t * m.top_k * m.inner * m.hidden,
        grouped,
        per_step=m.layers,
    )

    def routed(
        x: Tensor, norm: Tensor, eps: float, router: Tensor, bias: Tensor | None, k: int, renormalize: bool
    ) -> tuple[Tensor, ...]:
        normed = functional.rms_norm(x, norm.shape, norm, eps)
        return normed, *functional.linear(normed, router, bias).float().softmax(-1).topk(k, -1)

    yield Work(
        "norm_route",
        "",
        m,
        t,
        lambda: (random(t, m.hidden), random(m.hidden), EPS, matrix(m.experts, m.hidden), None, m.top_k, True),
        dense_bytes(t, m.hidden, m.experts, m.hidden) + 8 * t * m.top_k,
        2 * t * m.hidden * m.experts,
        routed,
        per_step=m.layers,
    )
    yield Work(
        "moe_route",
        "",
        m,
        t,
        lambda: (random(t, m.experts), m.top_k, True),
        2 * t * m.experts + 8 * t * m.top_k,
        torch_best=lambda logits, k, renormalize: logits.float().softmax(-1).topk(k, -1),
    )


def _floor(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, max_k: int) -> Tensor:
    """The part of the way that costs: the best of a row in order."""
    scaled = logits / temperature[:, None]
    return scaled.topk(max_k, -1)[0] if max_k else scaled.softmax(-1).sort(-1, descending=True)[0]


def sampling(model: ModelShape, tokens: int) -> Iterator[Work]:
    """From logits to tokens; all rows with a temperature."""
    m, t = model, tokens
    if t > MOST_ROWS:
        return

    def gumbel(logits: Tensor, temperature: Tensor, *rest: Any) -> Tensor:
        weight = (logits.float() / temperature[:, None]).softmax(-1)
        return weight.div_(torch.empty_like(weight).exponential_()).argmax(-1)

    def row(value: float) -> Tensor:
        return torch.full((t,), value, device=DEVICE)

    def seeds() -> tuple[Tensor, Tensor]:
        return torch.randint(-(2**62), 2**62, (t,), device=DEVICE), torch.arange(t, device=DEVICE)

    def logits() -> Tensor:
        return torch.randn(t, m.vocab, device=DEVICE) * 3

    size = t * m.vocab
    yield Work("draw", "", m, t, lambda: (random(t, m.vocab), row(0.8), *seeds()), 2 * size, 0, gumbel, per_step=1)
    yield Work("argmax", "", m, t, lambda: (logits(),), 4 * size, torch_best=lambda x: x.argmax(-1))
    yield Work("sample", "", m, t, lambda: (logits(), row(0.8), row(-math.inf), *seeds()), 4 * size, torch_best=gumbel)

    def limited(most: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: (logits(), row(0.8), torch.full((t,), most, device=DEVICE), row(0.95), row(0.0), most)

    for label, most in (("k50 p0.95", 50), ("p0.95", 0)):
        yield Work("keep_floor", label, m, t, limited(most), 4 * size, torch_best=_floor)


PARTS = (dense, attention, experts, norms_and_gates, sampling)


def works(model: ModelShape, tokens: int) -> Iterator[Work]:
    """Every op's work in one step of `tokens` tokens: decode rows, or beyond MOST_ROWS prompts of PROMPT tokens."""
    for part in PARTS:
        yield from part(model, tokens)
