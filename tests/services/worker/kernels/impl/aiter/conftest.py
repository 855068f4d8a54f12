"""A fake AITER for every test that asks; what was bound to it is forgotten afterwards."""

from collections.abc import Iterator

import pytest

from services.worker.kernels.impl.aiter import _host
from tests.services.worker.kernels.impl.aiter.fake import Fake, install
from tests.services.worker.kernels.impl.aiter.hold import Holder


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    _host.bound.cache_clear()
    _host.constant.cache_clear()
    yield
    _host.bound.cache_clear()
    _host.constant.cache_clear()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Holder:
    return Holder(monkeypatch)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """`fake(release, arch, exact)`, as `install`."""
    return lambda *arguments, **keywords: install(monkeypatch, *arguments, **keywords)
