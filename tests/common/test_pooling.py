import msgspec
import pytest

from common.pooling import Pooling, vector_bytes


def test_bytes_of_a_vector() -> None:
    assert vector_bytes(Pooling(), 12) == 48
    assert vector_bytes(Pooling(dimensions=5), 12) == 20


def test_a_way_of_pooling_that_is_none_is_no_message() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["cls", True, 0]), type=Pooling)
