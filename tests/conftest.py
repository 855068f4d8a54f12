"""Fixtures for all tests: sockets that cannot leak, and time-outs that turn a hang into a failure."""

import faulthandler
from collections.abc import Iterator

import pytest

TEST_LIMIT_S = 300


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A test that hangs prints all stacks and ends the run instead of the whole build."""
    faulthandler.dump_traceback_later(TEST_LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
