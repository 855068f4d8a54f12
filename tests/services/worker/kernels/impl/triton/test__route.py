"""Each form of norm, router and choice by itself, whatever the number of tokens that takes it."""

import sys

import pytest

from services.worker.kernels.impl.triton.norm_route import IMPL
from services.worker.kernels.ops.norm_route import make_norm_route_case
from tests.services.worker.kernels.impl.triton.hold import Holder


@pytest.mark.parametrize(("few", "medium"), [(32, 0), (0, 32), (0, 0)], ids=["few", "shared", "many"])
def test_is_the_meaning(hold: Holder, monkeypatch: pytest.MonkeyPatch, few: int, medium: int) -> None:
    module = sys.modules[IMPL.run.__module__]
    monkeypatch.setattr(module, "FEW_LOGITS", few * 18)
    monkeypatch.setattr(module, "MEDIUM_LOGITS", medium * 18)
    hold(IMPL, cases=[make_norm_route_case(20, 72, 18, 4, biased=True)])
