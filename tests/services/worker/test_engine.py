from common.columns import pack_i32
from common.protocol import StepResult
from services.worker.engine import result_of
from services.worker.shortage import Outcome


def test_a_result_says_all_that_a_pending_step_knows() -> None:
    pending = Outcome(pack_i32([5, 6, 7]), pack_i32([1]), (b"\x02\x01", b"\x03\x00"))
    wanted = StepResult(9, pack_i32([5, 6, 7]), 40, failed=pack_i32([1]), counts=b"\x02\x01", drafted=b"\x03\x00")
    assert result_of(9, pending, 40) == wanted
    assert result_of(9, Outcome(b"")) == StepResult(9, b"")
