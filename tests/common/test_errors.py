import msgspec

from common.errors import Reject, RejectReason
from common.protocol import Refused


def test_a_reject_keeps_what_the_client_is_told() -> None:
    reject = Reject(RejectReason.INVALID, "must be positive", "max_tokens")
    assert (reject.reason, reject.message, reject.param) == ("invalid", "must be positive", "max_tokens")
    assert str(reject) == "must be positive"


def test_a_refusal_can_always_be_sent() -> None:
    reject = Reject(RejectReason.INVALID, "\ud800" + "x" * 10**6)
    message = Refused(1, reject.reason, reject.message)
    assert len(msgspec.msgpack.encode(message)) < 4000
    assert reject.message.startswith("\\ud800xxx")


def test_a_reason_of_another_version_is_our_fault() -> None:
    assert RejectReason("what is this") is RejectReason.INTERNAL
