import pytest

from common.columns import pack_i32, pack_u64, unpack_i32, unpack_u64


def test_columns_are_little_endian_and_round_trip() -> None:
    assert pack_i32([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    assert pack_u64([2**64 - 1]) == b"\xff" * 8
    assert unpack_i32(pack_i32(range(-5, 5))).tolist() == list(range(-5, 5))
    assert unpack_u64(pack_u64([0, 2**63])).tolist() == [0, 2**63]
    assert unpack_i32(b"").tolist() == []


@pytest.mark.parametrize(
    ("pack", "value"), [(pack_i32, 2**31), (pack_i32, -(2**31) - 1), (pack_u64, 2**64), (pack_u64, -1)]
)
def test_values_outside_the_width_are_refused(pack, value: int) -> None:
    with pytest.raises(OverflowError):
        pack([value])


@pytest.mark.parametrize(("unpack", "length"), [(unpack_i32, 3), (unpack_i32, 5), (unpack_u64, 4)])
def test_ragged_columns_are_refused(unpack, length: int) -> None:
    with pytest.raises(TypeError):
        unpack(b"x" * length)
