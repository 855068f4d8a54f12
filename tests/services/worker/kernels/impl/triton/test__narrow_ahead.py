"""What is compiled ahead of time is what would be launched: every argument is there, words where a unit takes words."""

import pytest

from services.worker.kernels.impl.triton import _narrow_ahead


@pytest.mark.parametrize("form", sorted(_narrow_ahead.STORED))
@pytest.mark.parametrize("rows", [1, 16, 2048])
def test_every_argument_has_a_type_or_a_value(form: str, rows: int) -> None:
    cases = _narrow_ahead.aot_cases(form, ((512, 1024),), (rows,), zeros=form == "int4", norm=rows == 1)
    assert {target for case in cases for target in case.targets} == {"sm_90", "gfx942", "gfx950"}
    for case in cases:
        assert set(case.signature) == set(case.kernel.arg_names), case.name


def test_four_bits_beside_wide_x_come_as_words_where_a_step_is_wide_enough() -> None:
    nvidia, amd = _narrow_ahead.aot_cases("int4", ((6144, 4096),), (16,), group=128)
    assert nvidia.signature["weight_ptr"] == "*i16:16" and amd.signature["weight_ptr"] == "*u8:16"
