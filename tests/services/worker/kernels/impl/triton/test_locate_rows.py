from collections.abc import Callable
from typing import Any

from services.worker.kernels.impl.triton.locate_rows import IMPL


def test_equals_the_meaning(hold: Callable[[Any], None]) -> None:
    hold(IMPL)
