"""What goes to the scheduler of a step that has ended."""

from common.columns import pack_i32
from services.worker.engine import result_of


class Ended:
    failed = pack_i32([1])

    def ready(self) -> bool:
        return True

    def tokens(self) -> bytes:
        return pack_i32([7, 8])

    def counts(self) -> tuple[bytes, bytes]:
        return b"\x02", b"\x03"


def test_a_result_has_tokens_failures_and_what_drafts_came_to() -> None:
    result = result_of(5, Ended(), 12)
    assert (result.step, result.tokens, result.failed, result.device_us) == (5, pack_i32([7, 8]), pack_i32([1]), 12)
    assert (result.counts, result.drafted) == (b"\x02", b"\x03")
