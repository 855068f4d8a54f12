"""Gives a host an object for sums over GPUs, as AITER has it, for tests without GPUs."""

import sys
from types import ModuleType

import pytest

MODULE = "aiter.dist.device_communicators.custom_all_reduce"


def give_custom(monkeypatch: pytest.MonkeyPatch, custom: type) -> None:
    """Beside an AITER that is installed already, the fake one for example."""
    module = ModuleType(MODULE)
    module.CustomAllreduce = custom  # type: ignore[attr-defined]
    parts = MODULE.split(".")
    for depth in range(2, len(parts)):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
