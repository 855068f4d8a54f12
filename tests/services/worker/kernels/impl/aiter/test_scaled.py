"""What test_mutants.py cannot do to a call: heads that are not padded; and hosts without AITER's functions."""

import sys
from types import ModuleType

import pytest

from services.worker.kernels.registry import Facts
from tests.services.worker.kernels.impl.aiter.calls import BF16, hold, host, impl_of, module_of
from tests.services.worker.kernels.impl.aiter.fake import NEW
from tests.services.worker.kernels.impl.aiter.hold import ARCHES
from tests.services.worker.kernels.impl.aiter.mutants import OPS


@pytest.mark.parametrize("arch", ARCHES)
def test_as_many_heads_as_the_model_has_are_found(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with host(monkeypatch, NEW, arch) as patch:
        patch.setattr(module_of("mla_decode"), "padded_heads", lambda num_heads, *others: num_heads)
        with pytest.raises(AssertionError):
            hold(impl_of("mla_decode"))


@pytest.mark.parametrize("name", OPS)
def test_other_hosts_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", ModuleType("aiter"))
    assert "needs gfx9" in str(impl_of(name).refuses(Facts("cuda", "sm_90", BF16)))
    reason = impl_of(name).refuses(Facts("cuda", "gfx950", BF16)) or ""
    assert reason.startswith("this host has no aiter.") or "cannot be imported" in reason
