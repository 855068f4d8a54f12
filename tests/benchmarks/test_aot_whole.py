"""Every kernel compiled afresh for every target, changed or not: `make test-long`."""

from pathlib import Path

import pytest

from benchmarks.aot import TARGETS
from tests.benchmarks.test_aot import compare

pytestmark = pytest.mark.long


@pytest.mark.parametrize("target", TARGETS)
def test_the_whole_table_is_what_a_compiler_says(target: str, tmp_path: Path) -> None:
    compare(tmp_path, target)
