"""An AITER of torch, for tests: the places and signatures of a listed release, and what each call means and refuses.

Arguments come by keyword only, as they must. A reference checks what AITER's own code checks, and what it assumes
without checking (layouts, contiguity, dtypes), since there the real one gives garbage.
"""

import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.kernels.impl.aiter import _host
from tests.services.worker.kernels.impl.aiter.references import References
from tests.services.worker.kernels.impl.aiter.scaled import put_enums

Fake = Callable[..., "FakeAiter"]  # the fixture: `install` for one test
OLD, NEW = "0.1.7.post2.dev18", "e4048607 (2026-08-22)"
RELEASES = (OLD, NEW)


class FakeAiter:
    """`calls`: the places called, in order. `given`: the arguments of each."""

    def __init__(self, release: str, arch: str, exact: bool) -> None:
        self.calls: list[str] = []
        self.given: list[dict[str, Any]] = []
        self.modules: dict[str, ModuleType] = {"aiter": ModuleType("aiter")}
        self.modules["aiter"].__spec__ = ModuleSpec("aiter", None)  # installed, to who asks
        put_enums(self.modules["aiter"])
        references = References(arch, exact)
        for place, parameters in _host.releases()[release].items():
            module, _, attributes = place.partition(":")
            name = attributes.rpartition(".")[2]
            # two modules may have functions of one name
            own = getattr(references, f"{module.rpartition('.')[2]}_{name}", None)
            reference = own or getattr(references, name, None)
            if parameters is not None and reference is not None:
                self._put(place, self._function(place, parameters, reference))

    def _function(self, place: str, parameters: _host.Parameters, reference: Callable[..., Any]) -> Callable[..., Any]:
        def run(**given: Any) -> Any:
            bound = inspect.signature(run).bind(**given)
            self.calls.append(place.rpartition(":")[2].rpartition(".")[2])
            self.given.append(bound.arguments)
            return reference(SimpleNamespace(**dict.fromkeys(parameters) | bound.arguments))

        kind = inspect.Parameter.KEYWORD_ONLY
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, kind, default=inspect.Parameter.empty if must else None)
                for name, must in parameters.items()
            ]
        )
        return run

    def _put(self, place: str, function: Callable[..., Any]) -> None:
        module_name, _, attributes = place.partition(":")
        parts = module_name.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            self.modules.setdefault(name, ModuleType(name)).__path__ = []  # a package of what lies below
        *objects, last = attributes.split(".")
        owner: Any = self.modules[module_name]
        for name in objects:
            if not hasattr(owner, name):
                setattr(owner, name, SimpleNamespace())
            owner = getattr(owner, name)
        setattr(owner, last, function)


def install(
    monkeypatch: pytest.MonkeyPatch, release: str = NEW, arch: str = "gfx942", exact: bool = False
) -> FakeAiter:
    """Until the test ends. `exact`: takes float32 too, which the real one mostly does not."""
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    made = FakeAiter(release, arch, exact)
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    _host.bound.cache_clear()
    _host.constant.cache_clear()
    return made


def fp8_of(arch: str) -> torch.dtype:
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
