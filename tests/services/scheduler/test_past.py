import pytest

from common.columns import pack_i32
from common.protocol import Finished, FinishReason, Sampling
from services.scheduler.past import Past
from services.scheduler.request import Request, Sequence
from services.scheduler.tenants import Tenant
from tests.services.scheduler.harness import Harness, ids


def ended(past: Past, seq_id: int, output: int = 2, origin: int = -1, why: FinishReason = FinishReason.LENGTH) -> None:
    prompt = pack_i32([7])
    sequence = Sequence(seq_id, Request(prompt, 1, b""), Sampling(9), (0, 0), 9, bytearray(prompt), Tenant("", 1))
    sequence.origin = seq_id if origin < 0 else origin
    if origin >= 0:
        past.names[origin] = seq_id
    sequence.tokens += pack_i32(range(output))
    past.add(sequence, Finished(seq_id, why))


def test_output_and_end_are_found_by_origin_and_by_name() -> None:
    past = Past()
    ended(past, 5, origin=3)
    for seq_id in (3, 5):
        found = past.find(seq_id)
        assert found is not None and found.output == pack_i32([0, 1]) and found.finished.seq_id == 5
    assert 5 in past and 3 not in past and past.find(4) is None


def test_what_was_aborted_keeps_only_its_story() -> None:
    past = Past()
    ended(past, 5, why=FinishReason.ABORT)
    found = past.find(5)
    assert found is not None and found.output == b""


def test_the_number_of_sequences_is_bounded_and_names_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.past.SEQUENCES_KEPT", 2)
    past = Past()
    ended(past, 5, origin=3)
    past.names[4] = 6  # still open
    for seq_id in (7, 8):
        ended(past, seq_id)
    assert len(past) == 2 and past.names == {4: 6} and past.find(3) is None


def test_a_name_that_was_given_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.past.SEQUENCES_KEPT", 1)
    past = Past()
    ended(past, 5, origin=3)
    ended(past, 6, origin=3)
    assert past.names == {3: 6} and past.name(3) == 6


def test_kept_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.past.TOKENS_KEPT", 10)
    past = Past()
    for seq_id in range(5):
        ended(past, seq_id, output=4)
    assert len(past) == 2 and 4 in past
    ended(past, 9, output=11)
    assert len(past) == 0


def test_stories_of_ended_sequences_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.past.SEQUENCES_KEPT", 2)
    core = Harness.with_worker()
    seq_ids = [core.admit(ids(3), max_tokens=1) for _ in range(3)]
    core.run()
    assert core.core.story(seq_ids[0]) == [] and core.core.story(seq_ids[2])
