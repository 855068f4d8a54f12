import pytest

from common.errors import Reject, RejectReason
from services.api.bodies import Bodies, Hold


def test_bodies_share_a_bound_and_give_back_what_they_had() -> None:
    bodies = Bodies(100)
    one, two = Hold(bodies), Hold(bodies)
    one.add(60)
    two.add(40)
    with pytest.raises(Reject) as caught:
        two.add(1)
    assert caught.value.reason is RejectReason.OVERLOADED
    two.release()
    two.release()
    assert bodies.held == 60
    one.release()
    assert bodies.held == 0


def test_one_alone_may_exceed_it() -> None:
    bodies = Bodies(100)
    Hold(bodies).add(500)
    with pytest.raises(Reject):
        Hold(bodies).add(1)
