"""The store of batches: one result a line whoever dies when, and each end a batch can have."""

import time
from pathlib import Path

import pytest

from services.api.batches.database import Database, signed
from services.api.batches.files import Files
from services.api.batches.records import Batch, File
from services.api.batches.work import Work

ONE, TWO = 5, (1 << 64) - 3  # incarnations have 64 bits


class Replica:
    """One process's view of the store."""

    def __init__(self, root: Path, own: int) -> None:
        self.database = Database(root)
        self.files = Files(self.database, root)
        self.work = Work(self.database, self.files, own)


@pytest.fixture
def one(tmp_path: Path) -> Replica:
    return Replica(tmp_path, ONE)


@pytest.fixture
def two(tmp_path: Path) -> Replica:
    return Replica(tmp_path, TWO)


def batch(name: str = "b", owner: str = "me", expires: int = 1 << 40) -> Batch:
    return Batch(name, owner, "/v1/completions", "file", "null", int(time.time()), expires, "validating")


def begin(replica: Replica, name: str = "b", lines: int = 3, **fields: int) -> None:
    assert replica.work.add(batch(name, **fields), 100)  # type: ignore[arg-type]
    assert (unread := replica.work.take_unread()) is not None and unread.id == name
    replica.work.begin(name, ((number, f"c{number}", b"{}") for number in range(1, lines + 1)))


def state(replica: Replica, name: str = "b") -> tuple[str, int, int, int]:
    found = replica.work.find(name, "me")
    assert found is not None
    return found.status, found.total, found.done, found.failed


def test_lines_are_taken_once_and_answered_once(one: Replica, two: Replica) -> None:
    begin(one)
    (first,), rest = one.work.take(1), two.work.take(9)
    assert [line.line for line in (first, *rest)] == [1, 2, 3]
    assert one.work.take(9) == two.work.take(9) == []
    assert one.work.answer(first, True, b"r1") and not one.work.answer(first, True, b"again")
    assert not one.work.answer(rest[0], True, b"not mine")
    assert two.work.answer(rest[1], False, b"r3") and one.work.take_finished() is None
    two.work.give_back(rest[0])
    (again,) = one.work.take(9)
    assert not two.work.answer(rest[0], True, b"late"), "it belongs to the other one now"
    assert one.work.answer(again, True, b"r2")
    assert list(one.work.results("b", good=True)) == [b"r1", b"r2"] and list(two.work.results("b", False)) == [b"r3"]
    assert state(one) == ("in_progress", 3, 2, 1)


def test_what_the_dead_had_goes_to_the_living(one: Replica, two: Replica) -> None:
    begin(one)
    lost = one.work.take(2)
    assert two.work.release([ONE]) == 0 and two.work.release([]) == 2
    assert {line.line for line in two.work.take(9)} == {1, 2, 3}
    assert not one.work.answer(lost[0], True, b"from the dead")


def test_a_batch_that_was_being_read_is_read_by_another(one: Replica, two: Replica) -> None:
    assert one.work.add(batch(), 1) and one.work.take_unread() is not None and two.work.take_unread() is None
    two.work.release([])
    unread = two.work.take_unread()
    assert unread is not None
    two.work.begin(unread.id, [(1, "a", b"{}")])
    assert state(two) == ("in_progress", 1, 0, 0)


def test_an_input_that_breaks_halfway_leaves_nothing(one: Replica) -> None:
    def lines():  # type: ignore[no-untyped-def]
        yield 1, "a", b"{}"
        raise LookupError

    one.work.add(batch(), 1)
    with pytest.raises(LookupError):
        one.work.begin("b", lines())
    one.work.fail("b", "[3]")
    assert state(one) == ("failed", 0, 0, 0) and one.work.take(9) == [] and not one.work.begun()


def test_the_end_lists_both_files_and_forgets_the_lines(one: Replica, two: Replica) -> None:
    begin(one, lines=1)
    (line,) = one.work.take(1)
    one.work.answer(line, True, b"r")
    taken = one.work.take_finished()
    assert taken is not None and two.work.take_finished() is None
    file = content(one, b"r\n")
    assert one.files.of("me") == [], "nobody sees half an end"
    one.work.finish(taken, file, None)
    assert state(one) == ("completed", 1, 1, 0) and one.files.of("me") == [file] and not one.work.begun()
    assert list(one.work.results("b", True)) == []


def test_who_was_given_up_while_it_wrote_changes_nothing(one: Replica, two: Replica) -> None:
    begin(one, lines=1)
    one.work.answer(one.work.take(1)[0], True, b"r")
    taken = one.work.take_finished()
    assert taken is not None
    two.work.release([])
    other = two.work.take_finished()
    assert other is not None
    stale, good = content(one, b"stale"), content(two, b"good")
    one.work.finish(taken, stale, None)
    assert state(one)[0] == "in_progress" and not one.files.path(stale.id).exists()
    two.work.finish(other, good, None)
    found = two.work.find("b", "me")
    assert found is not None and (found.status, found.output) == ("completed", good.id)
    assert two.files.of("me") == [good]


def test_cancelled_batches_wait_for_what_runs(one: Replica, two: Replica) -> None:
    begin(one)
    (running,) = one.work.take(1)
    assert not one.work.cancel("b", "somebody") and one.work.cancel("b", "me") and not one.work.cancel("b", "me")
    assert two.work.take(9) == [] and two.work.take_finished() is None
    one.work.answer(running, True, b"r")
    taken = two.work.take_finished()
    assert taken is not None and list(two.work.undone("b")) == ["c2", "c3"]
    two.work.finish(taken, content(two, b"r"), None)
    found = two.work.find("b", "me")
    assert found is not None and (found.status, found.done) == ("cancelled", 1)


def test_batches_expire(one: Replica) -> None:
    begin(one, expires=int(time.time()) - 1)
    begin(one, "later")
    one.work.expire()
    taken = one.work.take_finished()
    assert taken is not None and (taken.id, taken.status) == ("b", "expiring")
    one.work.finish(taken, None, None)
    assert state(one)[0] == "expired" and state(one, "later")[0] == "in_progress"


def test_cancelled_before_it_was_read(one: Replica) -> None:
    one.work.add(batch(), 1)
    assert one.work.take_unread() is not None and one.work.cancel("b", "me")
    one.work.begin("b", [(1, "a", b"{}")])
    assert one.work.take(9) == [] and one.work.take_finished() is not None


def test_an_owner_has_so_many_at_once_and_sees_his_own(one: Replica) -> None:
    assert one.work.add(batch("a"), 1) and not one.work.add(batch("b"), 1) and one.work.add(batch("c", "other"), 1)
    assert [each.id for each in one.work.of("me")] == ["a"] and one.work.find("c", "me") is None
    one.work.fail("a", "[]")
    assert one.work.add(batch("b"), 1)


def test_incarnations_fit() -> None:
    assert [signed(each) for each in (0, ONE, TWO, 1 << 63)] == [0, 5, -3, -(1 << 63)]


def content(replica: Replica, text: bytes) -> File:
    path = replica.files.arriving()
    path.write_bytes(text)
    return replica.files.place(path, "me", "name", "batch_output")
