from common.errors import Reject, RejectReason


def test_a_reject_keeps_what_the_client_is_told() -> None:
    reject = Reject(RejectReason.INVALID, "must be positive", "max_tokens")
    assert (reject.reason, reject.message, reject.param) == ("invalid", "must be positive", "max_tokens")
    assert str(reject) == "must be positive"
