"""Moves between two cores that share a book."""

from common.columns import pack_i32
from common.config import Kv, Scheduler
from common.protocol import Admit, FinishReason, ModelFacts, Sampling, StepResult, WorkerReady
from services.scheduler import moves
from services.scheduler.book import Book
from services.scheduler.core import SchedulerCore
from services.scheduler.events import SendTokens, WorkerLost
from tests.services.scheduler.harness import ids


class Pair:
    """Cores of 1 and of 8 rows, unless said otherwise."""

    def __init__(self, blocks: int = 64, rows: tuple[int, int] = (1, 8)) -> None:
        self.book = Book()
        self.cores = [SchedulerCore(Scheduler(), Kv(), 5, book=self.book) for _ in range(2)]
        for core, num_blocks, max_rows in zip(self.cores, (64, blocks), rows, strict=True):
            core.handle([WorkerReady(ModelFacts("m", "a", 100, 64, (2,), 4, num_blocks), max_rows)], 0.0)

    def admit(self, *seq_ids: int, num_prompt: int = 6) -> None:
        """All at once to the first core, which makes its plans then."""
        sampling = Sampling(max_tokens=8, stop_token_ids=(9,))
        self.cores[0].handle([Admit(seq_id, pack_i32(ids(num_prompt, seq_id)), sampling) for seq_id in seq_ids], 0.0)

    def check(self) -> None:
        for core in self.cores:
            core.check()


def test_a_move_takes_everything_along() -> None:
    pair = Pair()
    pair.admit(1, 2)
    first, second = pair.cores
    sequence = first.state.sequences[2]
    moves.move(first, second, sequence, 3.0)
    pair.check()
    assert list(first.state.sequences) == [1] and list(second.state.sequences) == [2]
    assert second.changed and (first.state.waiting.tokens, second.state.waiting.tokens) == (0, 6)
    assert sequence.story()[-1].endswith("moved to another worker group")
    (plan,) = second.plans()[:1]
    assert plan.added[0].seq_id == 2
    second.apply(StepResult(plan.step, pack_i32([9])), 4.0)  # its stop token is known there
    (sent,) = [effect for effect in pair.book.drain() if isinstance(effect, SendTokens)]
    assert sent.batch.finished[0].reason is FinishReason.STOP_TOKEN


def test_a_group_without_worker_is_emptied() -> None:
    pair = Pair(rows=(8, 8))
    pair.admit(1, 2, 3)
    first, second = pair.cores
    first.apply(WorkerLost("killed"), 1.0)
    moves.empty(first, [second], 1.0)
    assert first.idle and sorted(second.state.sequences) == [1, 2, 3]
    assert [sequence.worker_deaths for sequence in second.state.sequences.values()] == [1, 1, 1]
    pair.check()


def test_what_fits_nowhere_ends_with_an_error_that_says_so() -> None:
    pair = Pair(blocks=3)
    pair.admit(1, num_prompt=20)
    first, second = pair.cores
    first.apply(WorkerLost("left", died=False), 1.0)
    moves.empty(first, [second], 1.0)
    assert first.idle and second.idle
    ends = [end for effect in pair.book.drain() if isinstance(effect, SendTokens) for end in effect.batch.finished]
    assert [end.reason for end in ends] == [FinishReason.ERROR] and "the largest takes 12" in ends[0].message


def test_an_idle_group_takes_the_oldest_that_were_passed_over_and_no_more_than_it_has_rows_for() -> None:
    pair = Pair(rows=(2, 3))
    pair.admit(*range(1, 9), num_prompt=1)
    first, second = pair.cores
    assert first.left_over == 6
    moves.balance(pair.cores, 1.0)
    assert list(second.state.sequences) == [3, 4, 5] and first.left_over == 3
    moves.balance(pair.cores, 1.0)
    assert len(second.state.sequences) == 3
    pair.check()


def test_only_those_move_that_gain_by_it() -> None:
    pair = Pair(rows=(1, 3))
    pair.admit(*range(1, 9))
    moves.balance(pair.cores, 1.0)
    assert list(pair.cores[1].state.sequences) == [2, 3]  # the next one has less to wait for where it is


def test_nobody_takes_from_a_group_that_passes_nobody_over() -> None:
    pair = Pair(rows=(8, 8))
    pair.admit(1, 2)
    moves.balance(pair.cores, 1.0)
    assert pair.cores[1].idle
