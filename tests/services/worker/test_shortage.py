"""Steps in pieces: same tokens in the same order, rows that cannot run are named, other errors stay errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.columns import pack_i32, unpack_i32
from common.logprobs import StepLogprobs
from common.protocol import RowFault
from services.worker.shortage import SMALLEST, Outcome, Piece, Retry, attempt, is_out_of_memory
from services.worker.state import Step


def make_step(*rows: tuple[int, int, int, bool]) -> Step:
    """rows: (slot, position, count, samples)."""
    slots, positions, counts, samples = zip(*rows, strict=True)
    return Step(*(np.array(column, np.int64) for column in (slots, positions, counts)), np.array(samples, np.bool_))


@dataclass
class Device:
    """Runs steps that `fits` allows; a row's token is its end. Keeps how far each row has got."""

    fits: Callable[[Step], bool]
    computed: dict[int, int]
    ran: list[int] = field(default_factory=list)  # tokens of each run
    freed: int = 0
    given_up: list[Step] = field(default_factory=list)

    def run(self, step: Step) -> "Sampled":
        if not self.fits(step):
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB")
        self.ran.append(int(step.counts.sum()))
        ends = self._advance(step)
        return Sampled(pack_i32(ends[step.samples].tolist()))

    def give_up(self, step: Step) -> None:
        self.given_up.append(step)
        self._advance(step)

    def _advance(self, step: Step) -> np.ndarray:
        for slot, position, count in zip(step.slots, step.positions, step.counts, strict=True):
            assert self.computed[slot] == position, "a row's parts run in order and once"
            self.computed[slot] = position + count
        return step.positions + step.counts

    def free(self) -> None:
        self.freed += 1

    def retry(self, step: Step) -> Outcome:
        return Retry(self.run, self.free, self.give_up)(step)


@dataclass
class Sampled:
    column: bytes
    kept: tuple[bytes, bytes] = (b"", b"")
    faults: Sequence[RowFault] = ()
    reported: StepLogprobs | None = None

    def settle(self) -> None: ...

    def ready(self) -> bool:
        return True

    def tokens(self) -> bytes:
        return self.column

    def counts(self) -> tuple[bytes, bytes]:
        return self.kept

    def logprobs(self) -> StepLogprobs | None:
        return self.reported


ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 200), st.booleans()), min_size=1, max_size=12)


@given(ROWS, st.integers(SMALLEST, 400))
def test_any_step_gives_its_tokens_if_small_pieces_fit(rows: list[tuple[int, int, bool]], most: int) -> None:
    most = max(most, 2 * SMALLEST - 1)
    step = make_step(*((slot, *row) for slot, row in enumerate(rows)))
    device = Device(lambda piece: piece.counts.sum() <= most, {slot: row[0] for slot, row in enumerate(rows)})
    result = device.retry(step)
    ends = [position + count for position, count, samples in rows if samples]
    assert result.ready() and result.failed == b"" and list(unpack_i32(result.tokens())) == ends
    assert device.computed == {slot: row[0] + row[1] for slot, row in enumerate(rows)}
    assert max(device.ran) <= most and sum(device.ran) == step.counts.sum() and device.freed > 0


@given(ROWS, st.sets(st.integers(0, 11)))
def test_rows_that_cannot_run_are_named_and_the_others_run(rows: list[tuple[int, int, bool]], bad: set[int]) -> None:
    step = make_step(*((slot, *row) for slot, row in enumerate(rows)))
    bad &= set(range(len(rows)))
    device = Device(lambda piece: not bad & set(piece.slots.tolist()), {slot: row[0] for slot, row in enumerate(rows)})
    result = device.retry(step)
    assert set(unpack_i32(result.failed)) == bad
    ends = [0 if slot in bad else row[0] + row[1] for slot, row in enumerate(rows) if row[2]]
    assert list(unpack_i32(result.tokens())) == ends
    assert device.computed == {slot: row[0] + row[1] for slot, row in enumerate(rows)}, "all rows are counted on"


def test_the_rest_of_a_row_is_not_run_when_its_first_half_has_failed() -> None:
    device = Device(lambda piece: piece.positions[0] >= 40, {3: 0})
    result = device.retry(make_step((3, 0, 80, True)))
    assert device.ran == [] and list(unpack_i32(result.failed)) == [0] and result.tokens() == pack_i32([0])
    assert [step.counts.tolist() for step in device.given_up] == [[20], [20], [40]]


def test_what_cannot_be_run_again_is_given_up_whole() -> None:
    device = Device(lambda step: True, {0: 0, 3: 7})
    step = make_step((3, 7, 1, True), (0, 0, 64, False))
    outcome = Retry(device.run, device.free, device.give_up).give_up(step)
    assert outcome.tokens() == bytes(4) and list(unpack_i32(outcome.failed)) == [0, 1]
    assert device.computed == {0: 64, 3: 8} and device.freed == 1 and not device.ran


def test_halves_have_about_half_the_tokens_and_cut_only_single_rows() -> None:
    step = make_step((0, 0, 100, False), (1, 5, 1, True), (2, 7, 1, True))
    first, second = Piece(step, np.arange(3)).halves() or pytest.fail("no halves")
    assert (first.places.tolist(), second.places.tolist()) == ([0], [1, 2])
    early, late = first.halves() or pytest.fail("no halves")
    assert (early.step.positions.tolist(), early.step.counts.tolist()) == ([0], [50])
    assert (late.step.positions.tolist(), late.step.counts.tolist()) == ([50], [50])
    assert early.step.samples.tolist() == late.step.samples.tolist() == [False]
    row = make_step((0, 0, 2 * SMALLEST, True))
    early, late = Piece(row, np.arange(1)).halves() or pytest.fail("no halves")
    assert (early.step.samples.tolist(), late.step.samples.tolist()) == ([False], [True])
    assert Piece(make_step((0, 0, 2 * SMALLEST - 1, True)), np.arange(1)).halves() is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("HIP error: unspecified launch failure"), False),
    ],
)
def test_only_the_lack_of_memory_can_be_healed(error: RuntimeError, expected: bool) -> None:
    def run(step: Step) -> Sampled:
        raise error

    assert is_out_of_memory(error) is expected
    if expected:
        assert attempt(make_step((0, 0, 1, True)), run) is None
    else:
        with pytest.raises(RuntimeError, match=r"illegal|unspecified"):
            attempt(make_step((0, 0, 1, True)), run)


def test_tokens_are_read_once_from_where_the_device_wrote_them() -> None:
    pending = Sampled(pack_i32([5]))
    outcome = Outcome(pending)
    assert outcome.ready() and outcome.tokens() == pack_i32([5])
    pending.column = pack_i32([6])
    assert outcome.tokens() == pack_i32([5]) and outcome.failed == b""


def test_rows_with_drafts_keep_their_counts_in_any_pieces() -> None:
    """Rows 0 to 2 draft, row 3 is a chunk that samples, row 4 one that does not; row 1 cannot run."""
    step = make_step((0, 9, 3, True), (1, 9, 4, True), (2, 5, 1, True), (3, 0, 20, True), (4, 0, 9, False))
    step = step._replace(drafting=3)
    ran: list[tuple[list[int], int]] = []

    def run(piece: Step) -> Sampled:
        if len(piece.slots) > 1 or 1 in piece.slots:
            raise torch.OutOfMemoryError("out of memory")
        ran.append((piece.slots.tolist(), piece.drafting))
        kept = piece.counts[: piece.drafting].astype(np.uint8)
        counts = (kept.tobytes(), (kept - 1).tobytes()) if piece.drafting else (b"", b"")
        return Sampled(bytes(4 * int(kept.sum() if piece.drafting else piece.samples.sum())), counts)

    outcome = Retry(run, lambda: None, lambda given_up: None)(step)
    assert ran == [([0], 1), ([2], 1), ([3], 0), ([4], 0)]
    assert outcome.counts() == (bytes([3, 1, 1, 1]), bytes([2, 0, 0, 0]))
    assert len(outcome.tokens()) == 4 * 6 and outcome.failed == pack_i32([1])
