"""Ops, their implementations, and the one binding at start.

An op means its typed torch function. Providers other than `torch` implement it with the same signature in
impl/<provider>/<op>.py, whose `IMPL` is found by scanning that folder (`_*.py` are its shared parts). `bind` chooses
once from a priority list and facts; layers keep the plain callables. Nothing here is written after import.
"""

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from common import env
from services.worker.kernels.layout import TOKENS
from services.worker.kernels.traceable import traceable

F = TypeVar("F", bound=Callable[..., Any])

PROVIDERS = ("aiter", "triton", "numba", "torch")
ONLY_ON = {"numba": "cpu", "triton": "cuda", "aiter": "cuda"}  # dear to import: elsewhere they are not
# What the import of a provider's library, or of a part of it, ends with on a host that it does not suit.
UNUSABLE = (ImportError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError, AssertionError)


class BindError(Exception):
    """An explicit choice of a provider that cannot be met; the text says why."""


class Tolerance(NamedTuple):
    """How far an implementation may be from the meaning, and why not closer."""

    relative: float
    absolute: float
    why: str
    of_largest: float = 0.0  # besides, of results of 8 bits, whose scale may make anything of a small difference


class Case(NamedTuple):
    """One set of arguments: real model shapes, odd sizes, empty ones. `make` must be deterministic."""

    name: str
    make: Callable[[torch.dtype], tuple[Any, ...]]


class Sizes(NamedTuple):
    """Tokens of the steps that an op is tested with at a model's shapes."""

    decode: tuple[int, ...]
    prompt: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(sorted({*self.decode, *self.prompt}))


@dataclass(frozen=True, eq=False)
class Op(Generic[F]):
    """`meaning` is the definition, the fallback on every device, and the fake kernel of tracing."""

    name: str
    meaning: F
    cases: tuple[Case, ...]
    tolerances: Mapping[torch.dtype, Tolerance]
    writes: tuple[str, ...] = ()  # arguments that are changed in place
    by_value: bool = False  # the meaning decides by the values of tensors, so that no compiler may look into it
    scratch: tuple[str, ...] = ()  # arguments that nobody reads afterwards, so that a provider may write there

    @cached_property
    def in_cache(self) -> bool:
        """Whether it reads or writes pages of the KV cache: all such ops are bound to one layout."""
        return "k_cache" in inspect.signature(self.meaning).parameters


def op(
    cases: Sequence[Case],
    tolerances: Mapping[torch.dtype, Tolerance],
    writes: Sequence[str] = (),
    by_value: bool = False,
    scratch: Sequence[str] = (),
) -> Callable[[F], Op[F]]:
    """Makes the decorated torch function an op of the same name; the arguments are Op's fields."""

    def make(meaning: F) -> Op[F]:
        if unknown := {*writes, *scratch} - set(inspect.signature(meaning).parameters):
            raise TypeError(f"op {meaning.__name__} writes {unknown}, which are no arguments of it")
        return Op(meaning.__name__, meaning, tuple(cases), dict(tolerances), tuple(writes), by_value, tuple(scratch))

    return make


@dataclass(frozen=True)
class Facts:
    """What a choice may depend on: nothing else, no environment."""

    device: str  # "cpu" or "cuda" (torch's name for ROCm too)
    arch: str = ""  # "gfx942", "sm_90"; empty on a CPU
    dtype: torch.dtype = torch.float32
    shapes: Mapping[str, int] = field(default_factory=dict)  # head_dim, num_heads, num_kv_heads, block_tokens, ...


def _accept(facts: Facts) -> str | None:
    return None


def _by_token(facts: Facts) -> str:
    return TOKENS


@dataclass(frozen=True)
class Impl(Generic[F]):
    """One provider's implementation. `refuses` gives the reason why it cannot run under these facts, or None.

    `layout`: that of the KV pages that it takes under these facts (kernels/layout.py). `around_capture`: gives what
    graphs that call it must be captured in. `scales_each`: whether it takes 8-bit pages whose tokens and heads have a
    scale each (KvScale.each); an op not in_cache is not asked.
    """

    op: Op[F]
    provider: str
    run: F
    refuses: Callable[[Facts], str | None] = _accept
    layout: Callable[[Facts], str] = _by_token
    around_capture: Callable[[], AbstractContextManager[Any]] | None = None
    scales_each: bool = False

    def __post_init__(self) -> None:
        wanted, given = inspect.signature(self.op.meaning), inspect.signature(self.run)
        if wanted != given:
            raise TypeError(f"{self.provider}/{self.op.name}: signature {given} is not the op's {wanted}")

    def refusal(self, facts: Facts) -> str | None:
        if self.op.in_cache and facts.shapes.get("kv_fp8") == 2 and not self.scales_each:
            return "takes one scale for all keys and values, not one for each token and head"
        return self.refuses(facts)


class Binding(NamedTuple):
    """One row of the table: what runs, and why."""

    op: str
    provider: str
    reason: str


class Bindings:
    """The chosen callables: `bindings(rms_norm)` is a plain function with the op's signature.

    `layout`: of the KV pages that the ops in_cache take. `asked`: names of the ops that somebody has asked for.
    """

    def __init__(
        self,
        table: Sequence[Binding],
        chosen: Mapping[str, Callable[..., Any]],
        layout: str = TOKENS,
        around_capture: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    ) -> None:
        self.table = tuple(table)
        self.layout = layout
        self.asked: set[str] = set()
        self._chosen = dict(chosen)
        self._around_capture = dict(around_capture or {})

    def __call__(self, wanted: Op[F]) -> F:
        self.asked.add(wanted.name)
        run: F = self._chosen[wanted.name]  # type: ignore[assignment]
        return run

    def provider(self, wanted: Op[Any]) -> str:
        return next(row.provider for row in self.table if row.op == wanted.name)

    def capturing(self) -> ExitStack:
        """The context around the capture of graphs: what those ops want that somebody has asked for, each once."""
        with ExitStack() as stack:
            for enter in dict.fromkeys(enter for name, enter in self._around_capture.items() if name in self.asked):
                stack.enter_context(enter())
            return stack.pop_all()

    @property
    def digest(self) -> str:
        """Equal for equal choices; part of WorkerReady, so that unlike workers are noticed."""
        rows = "\n".join([f"{row.op} {row.provider}" for row in self.table] + [self.layout])
        return hashlib.sha256(rows.encode()).hexdigest()[:16]


@cache
def all_ops() -> dict[str, Op[Any]]:
    """Every op by name, found in kernels/ops."""
    found: dict[str, Op[Any]] = {}
    package = importlib.import_module("services.worker.kernels.ops")
    for entry in sorted(pkgutil.iter_modules(package.__path__), key=lambda entry: entry.name):
        module = importlib.import_module(f"{package.__name__}.{entry.name}")
        item = getattr(module, entry.name)
        assert isinstance(item, Op) and item.name == entry.name, f"ops/{entry.name}.py must define the op {entry.name}"
        found[item.name] = item
    return found


def find_impls(provider: str) -> tuple[dict[str, Impl[Any]], str]:
    """The provider's implementations by op, or none and the reason."""
    package_name = f"services.worker.kernels.impl.{provider}"
    if importlib.util.find_spec(package_name) is None:
        return {}, f"no {provider} implementations in this build"
    if importlib.util.find_spec(provider) is None:
        return {}, f"{provider} is not installed"
    try:
        importlib.import_module(provider)
    except UNUSABLE as error:
        return {}, f"{provider} cannot be imported: {error}"
    package = importlib.import_module(package_name)
    impls: dict[str, Impl[Any]] = {}
    for entry in pkgutil.iter_modules(package.__path__):
        if entry.name.startswith("_"):
            continue
        item = importlib.import_module(f"{package_name}.{entry.name}").IMPL
        assert isinstance(item, Impl) and item.op.name == entry.name, f"{provider}/{entry.name}.py must define IMPL"
        impls[item.op.name] = item
    return impls, ""


def find_for(facts: Facts, provider: str) -> tuple[dict[str, Impl[Any]], str]:
    """As find_impls, but imports nothing that cannot run there."""
    if ONLY_ON.get(provider, facts.device) != facts.device and not (provider == "triton" and env.interprets_triton()):
        return {}, "needs a GPU" if facts.device == "cpu" else "for CPUs"
    return find_impls(provider)


def bind(
    priority: Sequence[str],
    facts: Facts,
    choices: Mapping[str, str] | None = None,
    finder: Callable[[str], tuple[dict[str, Impl[Any]], str]] | None = None,
    opaque: bool = False,
) -> Bindings:
    """For each op the first provider of `priority` that can run it; `choices` (op to provider) must be met exactly.

    `opaque`: a compiler looks only into meanings, and not into those that decide by values (kernels/traceable.py).
    Raises BindError for an unknown name, for a choice that cannot be met, and when nothing in `priority` can run an op.
    """
    ops, choices = all_ops(), dict(choices or {})
    for name in [*priority, *choices.values()]:
        if name not in PROVIDERS:
            raise BindError(f"unknown kernel provider {name!r}; known: {', '.join(PROVIDERS)}")
    if unknown := sorted(set(choices) - set(ops)):
        raise BindError(f"unknown op {unknown[0]!r}; known: {', '.join(ops)}")
    finder = finder or partial(find_for, facts)
    impls: dict[str, tuple[dict[str, Impl[Any]], str]] = {}

    def refusal(item: Op[Any], provider: str, layout: str | None = None) -> str | None:
        if provider == "torch":
            return f"takes KV pages by token, not {layout}" if item.in_cache and layout not in (None, TOKENS) else None
        if provider not in impls:
            impls[provider] = finder(provider)
        found, reason = impls[provider]
        if item.name not in found:
            return reason or f"{provider} does not implement it"
        own = found[item.name].layout(facts)
        if item.in_cache and layout not in (None, own):
            return f"takes KV pages {own}, and not all ops can"
        return found[item.name].refusal(facts)

    def candidates(item: Op[Any]) -> list[str]:
        return [choices[item.name]] if item.name in choices else list(priority)

    def layout_of(item: Op[Any], provider: str) -> str:
        return TOKENS if provider == "torch" else impls[provider][0][item.name].layout(facts)

    cached = [item for item in ops.values() if item.in_cache]
    wanted = [layout_of(i, name) for i in cached for name in candidates(i) if refusal(i, name) is None]
    shared = [
        layout
        for layout in dict.fromkeys(wanted)
        if all(any(refusal(item, name, layout) is None for name in candidates(item)) for item in cached)
    ]
    layout = shared[0] if shared else TOKENS
    table: list[Binding] = []
    chosen: dict[str, Callable[..., Any]] = {}
    around: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
    for item in ops.values():
        refusals: list[str] = []
        for provider in candidates(item):
            if (reason := refusal(item, provider, layout)) is None:
                why = "chosen" if item.name in choices else "; ".join(refusals) or "first choice"
                table.append(Binding(item.name, provider, why))
                impl = None if provider == "torch" else impls[provider][0][item.name]
                run = item.meaning if impl is None else impl.run
                if impl is not None and impl.around_capture is not None:
                    around[item.name] = impl.around_capture
                if opaque and (provider != "torch" or item.by_value):
                    run = traceable(f"{provider}_{item.name}", run, item.meaning, item.writes)
                chosen[item.name] = run
                break
            refusals.append(f"{provider}: {reason}")
        else:
            raise BindError(f"op {item.name}: no provider can run it on {facts.device} ({'; '.join(refusals)})")
    return Bindings(table, chosen, layout, around)
