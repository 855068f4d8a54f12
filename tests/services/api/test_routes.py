import pytest

from common.errors import Reject
from common.protocol import Peer, api_of, tokenizer_of
from services.api.routes import Routes

A, B = Peer("tokenizer", 4, 100, ""), Peer("tokenizer", 5, 200, "")


def test_ids_name_both_sides_and_count_up() -> None:
    routes = Routes(3, 0x1ABCD)
    first, second = routes.take_ids(A, 2), routes.take_ids(B, 1)
    assert (api_of(first), tokenizer_of(first), tokenizer_of(second), first >> 32 & 0xFFFF) == (3, 4, 5, 0xABCD)
    assert (first & 0xFFFFFFFF, second & 0xFFFFFFFF) == (0, 2)


def test_ids_of_one_request_do_not_wrap() -> None:
    routes = Routes(0, 1)
    routes._counter = 2**32 - 1
    assert routes.take_ids(A, 2) & 0xFFFFFFFF == 0


def test_the_least_work_wins_and_then_who_was_given_less() -> None:
    routes = Routes(0, 1)
    with pytest.raises(Reject):
        routes.pick([])
    assert routes.pick([A, B]) is A
    routes.add(A.incarnation, 2)
    assert routes.pick([A, B]) is B
    routes.release(A.incarnation)
    routes.release(A.incarnation)
    assert routes.pick([A, B]) is B
    routes.forget(A.incarnation)
    assert routes.pick([A, B]) is A and routes.work == {}
