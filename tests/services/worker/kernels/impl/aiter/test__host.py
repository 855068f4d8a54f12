"""Binding by name and keyword: what a host may lack, and what is then said or left out."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.kernels.impl.aiter import _host
from services.worker.kernels.impl.aiter._host import Function, Twin, bound, constant, refusal
from services.worker.kernels.registry import Facts

GPU = Facts("cuda", "gfx942", torch.bfloat16)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An empty `aiter`."""
    module = ModuleType("aiter")
    monkeypatch.setitem(sys.modules, "aiter", module)
    return module


def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """As AITER makes them: no signature to be seen."""
    return lambda *arguments, **keywords: function(*arguments, **keywords)


def test_a_real_signature_is_believed(host: Any) -> None:
    host.norm = lambda x, weight, eps=1e-5: (x, weight, eps)
    function = Function("aiter:norm", needs=("x", "weight"), takes=("eps", "fast"))
    assert function.missing() is None
    assert function(x=1, weight=2, eps=3, fast=True) == (1, 2, 3), "an optional that the host does not know is left out"


def test_what_the_host_lacks_is_a_sentence(host: Any) -> None:
    host.norm = lambda x, weight, eps: None
    assert Function("aiter:other", needs=("x",)).missing() == "this host has no aiter.other"
    assert Function("aiter.deep:f", needs=("x",)).missing().startswith("aiter.deep cannot be imported: No module")
    reason = Function("aiter:norm", needs=("x", "weight", "eps", "gemma")).missing()
    assert reason == "aiter.norm of this host does not take gemma"
    assert Function("aiter:norm", needs=("x", "weight")).missing() == "aiter.norm of this host wants eps too"
    assert Function("aiter:norm", needs=("x", "weight"), takes=("eps",)).missing() is None


def test_a_module_that_breaks_when_imported_is_a_sentence(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise RuntimeError("ROCm version file not found")

    monkeypatch.setattr(_host.importlib, "import_module", broken)
    assert Function("aiter:norm", needs=()).missing() == "aiter cannot be imported: ROCm version file not found"


def test_the_first_place_that_is_there_counts(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = ModuleType("aiter.new"), ModuleType("aiter.old")
    old.f = lambda x: ("old", x)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aiter.old", old)
    function = Function("aiter.new:f", "aiter.old:f", needs=("x",))
    assert function(x=1) == ("old", 1)
    monkeypatch.setitem(sys.modules, "aiter.new", new)
    new.f = lambda x: ("new", x)  # type: ignore[attr-defined]
    bound.cache_clear()
    assert function(x=1) == ("new", 1)


def test_a_wrapper_is_asked_through_torchs_registration(host: Any) -> None:
    library = torch.library.Library("aiter", "FRAGMENT")
    library.define("registered_norm(Tensor dummy, Tensor x, float eps=1e-5) -> Tensor")
    host.registered_norm = wrapper(lambda x, eps: (x, eps))
    function = Function("aiter:registered_norm", needs=("x", "eps"))
    assert function.missing() is None and function(x=1, eps=2) == (1, 2)
    assert Function("aiter:registered_norm", needs=("x", "dummy")).missing() is not None
    assert Function("aiter:registered_norm", needs=("eps",)).missing().endswith("wants x too")
    library._destroy()


def test_a_wrapper_that_is_registered_nowhere_takes_what_all_releases_take(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: dict[str, dict[str, Any]] = {
        "old": {"aiter:f": {"x": True, "mode": False}, "aiter:new": None},
        "later": {"aiter:f": {"x": True, "between": False, "mode": False}, "aiter:new": {"x": True}},
    }
    monkeypatch.setattr(_host, "releases", lambda: listed)
    host.f, host.new, host.g = (wrapper(lambda **given: given) for _ in range(3))
    function = Function("aiter:f", needs=("x",), takes=("mode", "between"))
    assert function(x=1, mode=2, between=3) == {"x": 1, "mode": 2}
    assert Function("aiter:f", needs=("x", "between")).missing() == "aiter.f of this host does not take between"
    assert Function("aiter:new", needs=("x",)).missing() is None
    assert Function("aiter:g", needs=("x",)).missing() == "nobody knows what aiter.g of this host takes"


def test_serving_never_meets_what_is_missing_unannounced(host: Any) -> None:
    with pytest.raises(AssertionError, match=r"this host has no aiter\.norm"):
        Function("aiter:norm", needs=("x",))(x=1)


def test_refusals_of_all(host: Any) -> None:
    host.norm = lambda x: x
    norm, other = Function("aiter:norm", needs=("x",)), Function("aiter:other", needs=("x",))
    assert refusal(GPU, norm) is None
    assert refusal(Facts("cuda", "gfx950", torch.float16), norm) is None
    assert refusal(Facts("cuda", "sm_90", torch.bfloat16), norm) == "needs gfx942 or gfx950"
    assert refusal(Facts("cuda", "gfx942"), norm) == "does not do float32"
    assert refusal(GPU, norm, other) == "this host has no aiter.other"


def test_the_file_of_signatures_is_of_both_releases() -> None:
    found = _host.releases()
    assert len(found) == 2
    old, new = found.values()
    assert old.keys() == new.keys()
    for row in ("aiter:silu_and_mul", "aiter:rmsnorm2d_fwd"):
        assert old[row] is not None and new[row] is not None
    assert old["aiter:silu_and_mul"] == {"out": True, "input": True}
    assert new["aiter:silu_and_mul"] == {"out": True, "input": True, "limit": False}


def test_a_constant_is_looked_up_once(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host.Kind = SimpleNamespace(Silu=7)
    assert constant("aiter:Kind.Silu") == 7
    monkeypatch.setattr(_host, "find", None)
    assert constant("aiter:Kind.Silu") == 7


def test_a_twin_serves_only_where_the_function_is_not(host: Any) -> None:
    host.triton_norm = lambda x, weight: ("triton", x, weight)
    twin = Twin(lambda x: ("twin", x), Function("aiter:triton_norm", needs=("x", "weight")))
    function = Function("aiter:norm", needs=("x",), twin=twin)
    assert function.missing() is None and function(x=1) == ("twin", 1)
    _host.bound.cache_clear()
    host.norm = lambda x: ("compiled", x)
    assert function(x=1) == ("compiled", 1)
    _host.bound.cache_clear()
    del host.norm
    host.triton_norm = lambda x: x
    assert function.missing() == "this host has no aiter.norm", "the twin's own function cannot be called either"
