"""Each form of norm, router and choice by itself, whatever the number of tokens that takes it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.worker.kernels.impl.triton.norm_route import IMPL, run_few, run_many, run_shared
from services.worker.kernels.ops.norm_route import make_norm_route_case
from tests.services.worker.kernels.impl.triton.hold import Holder


@pytest.mark.parametrize("run", [run_few, run_shared, run_many])
def test_is_the_meaning(hold: Holder, run: Callable[..., Any]) -> None:
    hold(replace(IMPL, run=run), cases=[make_norm_route_case(20, 72, 18, 4, biased=True)])
