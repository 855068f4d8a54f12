from collections.abc import Callable
from typing import Any

from services.worker.kernels.impl.triton.propose_ngram import IMPL


def test_equals_the_meaning(hold: Callable[[Any], None]) -> None:
    hold(IMPL)
