"""The Triton implementation of norm_route against the op's meaning."""

from dataclasses import replace

from services.worker.kernels.impl.triton.norm_route import IMPL, run_many
from services.worker.kernels.ops.norm_route import make_norm_route_case
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)


def test_launches_leave_the_counters_as_they_found_them(hold: Holder) -> None:
    for _ in range(2):
        hold(IMPL, cases=[make_norm_route_case(3, 32, 6, 2), make_norm_route_case(1, 32, 9, 1)])


def test_many_tokens_are_routed_by_whole_programs(hold: Holder) -> None:
    hold(replace(IMPL, run=run_many), cases=[make_norm_route_case(40, 72, 18, 4, biased=True)])
