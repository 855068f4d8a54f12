"""A stand-in for an installed AITER: the names and signatures of one release, functions of our own behind them.

`install` puts it where the provider looks. A call that the release would refuse (an unknown keyword, a missing one)
is a TypeError here too.
"""

import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from services.worker.kernels.impl import aiter as provider
from services.worker.kernels.impl.aiter._host import Function, releases
from services.worker.kernels.registry import Impl

WHEEL, NEWER = sorted(releases())
ARCHES = ("gfx942", "gfx950")


def parts(*names: str) -> list[ModuleType]:
    """The provider's modules, all of them or those named."""
    found = [entry.name for entry in pkgutil.iter_modules(provider.__path__)]
    return [import_module(f"{provider.__name__}.{name}") for name in names or found]


def impl_of(name: str) -> Impl[Any]:
    item: Impl[Any] = parts(name)[0].IMPL
    return item


def signature_of(release: str, place: str) -> inspect.Signature | None:
    rows = releases()[release][place]
    if rows is None:
        return None
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    needed = [inspect.Parameter(name, kind) for name, must in rows.items() if must]
    return inspect.Signature(
        needed + [inspect.Parameter(name, kind, default=None) for name, m in rows.items() if not m]
    )


def strict(signature: inspect.Signature, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*arguments, **keywords)
        return function(**bound.arguments)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def install(monkeypatch: pytest.MonkeyPatch, release: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """`functions`: by place, as a Function names it; those that the release lacks are left out."""
    modules: dict[str, Any] = {"aiter": ModuleType("aiter")}
    for place, function in functions.items():
        signature = signature_of(release, place)
        if signature is None:
            continue
        module_name, _, attributes = place.partition(":")
        item = modules.setdefault(module_name, ModuleType(module_name))
        *holders, last = attributes.split(".")
        for holder in holders:
            if not hasattr(item, holder):
                setattr(item, holder, SimpleNamespace())
            item = getattr(item, holder)
        setattr(item, last, strict(signature, function))
    aiter_enums(modules["aiter"])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for part in parts():
        for item in vars(part).values():
            if isinstance(item, Function):
                item.forget()


def aiter_enums(module: Any) -> None:
    module.ActivationType = SimpleNamespace(Silu="Silu", Gelu="Gelu", Swiglu="Swiglu")
    kinds = ("No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128")
    module.QuantType = SimpleNamespace(**{kind: kind for kind in kinds})
