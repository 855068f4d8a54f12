"""Fixtures for the tests of the command line."""

from collections.abc import Iterator

import pytest

from tests.valence.running import Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One ready server for all tests of a file."""
    with serving() as running:
        running.read_until("curl")
        yield running
