"""The Triton implementation of rope_kv_write against the op's meaning."""

import pytest

from services.worker.kernels.impl.triton.rope_kv_write import IMPL
from services.worker.kernels.ops.rope_kv_write import make_rope_kv_case
from tests.services.worker.kernels.impl.triton.hold import Holder


def test_is_the_meaning(hold: Holder) -> None:
    hold(IMPL)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (32, 4)])
def test_is_the_meaning_for_any_share_of_heads(hold: Holder, heads: tuple[int, int]) -> None:
    hold(IMPL, cases=[make_rope_kv_case(2, *heads, 32, 24, normed) for normed in (False, True)])


def test_values_of_their_own_size(hold: Holder) -> None:
    hold(
        IMPL,
        cases=[
            make_rope_kv_case(5, 8, 4, (24, 20), 16, True),
            make_rope_kv_case(40, 4, 2, (24, 16), 8, False),
        ],
    )


def test_scales_of_each_token_and_head(hold: Holder) -> None:
    hold(
        IMPL,
        cases=[make_rope_kv_case(5, 6, 3, 40, rotary, normed, fp8=2) for rotary, normed in ((24, True), (40, False))],
    )
