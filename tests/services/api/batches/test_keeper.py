"""The loop that gets batches done: with a system that has room or not, refuses, and dies halfway."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.config import Api
from common.errors import Reject
from services.api.batches.keeper import Answer, Keeper, Store
from services.api.batches.records import Batch, Line
from services.api.batches.results import answered
from services.api.batches.work import Work
from tests.services.api.system import LIMIT_S, scenario

INPUT = b"".join(
    b'{"custom_id": "c%d", "method": "POST", "url": "/v1/completions", "body": {}}\n' % number for number in range(9)
)


class Answers:
    """Answers as told, in place of the system; by default well and at once."""

    def __init__(self, alive: list[int], on_line: Callable[[Line], Answer] | None = None) -> None:
        self.lines: list[str] = []
        self.open = self.most_open = 0
        self.room = True
        self.go_on = asyncio.Event()
        self.go_on.set()
        self._alive, self._on_line = alive, on_line

    def alive(self) -> list[int]:
        return self._alive

    def able(self) -> bool:
        return True

    def welcome(self) -> bool:
        return self.room

    async def __call__(self, line: Line) -> Answer:
        self.lines.append(line.custom)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await self.go_on.wait()
        self.open -= 1
        return self._on_line(line) if self._on_line else well(line)


def well(line: Line) -> Answer:
    return Answer(True, answered(line.custom, 200, "r", b'"%s"' % line.custom.encode()))


async def begin(keeper: Keeper, content: bytes = INPUT, name: str = "b") -> None:
    def add(store: Store) -> None:
        path = store.files.arriving()
        path.write_bytes(content)
        file = store.files.place(path, "me", "input", "batch")
        store.files.add(file)
        assert store.work.add(Batch(name, "me", "/v1/completions", file.id, "null", 1, 1 << 40, "validating"), 9)

    await keeper.call(add)
    keeper.tell()


async def until(keeper: Keeper, condition: Callable[[Batch], bool], name: str = "b") -> Batch:
    async with asyncio.timeout(LIMIT_S):
        while True:
            batch = await keeper.call(lambda store: store.work.find(name, "me"))
            if batch is not None and condition(batch):
                return batch
            await asyncio.sleep(0.005)


def ended(batch: Batch) -> bool:
    return batch.status in ("completed", "failed", "cancelled", "expired")


async def content(keeper: Keeper, file: str | None) -> list[bytes]:
    assert file is not None
    return (await keeper.call(lambda store: store.files.path(file).read_bytes())).splitlines()


def test_all_lines_so_many_at_a_time_in_the_order_of_the_input(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper(Api(storage_dir=str(tmp_path), batch_requests=4), 1)
        answers = Answers([1])
        answers.go_on.clear()
        running = asyncio.create_task(keeper.run(answers))
        await begin(keeper)
        async with asyncio.timeout(LIMIT_S):
            while answers.open < 4:
                await asyncio.sleep(0.005)
        answers.go_on.set()
        batch = await until(keeper, ended)
        assert (batch.status, batch.total, batch.done, batch.failed, batch.failures) == ("completed", 9, 9, 0, None)
        assert answers.most_open == 4 and sorted(answers.lines) == [f"c{number}" for number in range(9)]
        assert [b'"c%d"' % number in line for number, line in enumerate(await content(keeper, batch.output))] == [
            True
        ] * 9
        running.cancel()

    scenario(main)


def test_failures_have_a_file_of_their_own_and_refusals_that_pass_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.api.batches.keeper.AGAIN_S", 0.0)

    async def main() -> None:
        refused: set[str] = set()

        def on_line(line: Line) -> Answer:
            if line.custom == "c3":
                return Answer(False, answered("c3", 400, "r", b"{}"))
            if line.custom not in refused:
                refused.add(line.custom)
                return Answer(False, None)
            return well(line)

        keeper = Keeper(Api(storage_dir=str(tmp_path)), 1)
        answers = Answers([1], on_line)
        running = asyncio.create_task(keeper.run(answers))
        await begin(keeper)
        batch = await until(keeper, ended)
        assert (batch.done, batch.failed, len(answers.lines)) == (8, 1, 17)
        assert len(await content(keeper, batch.output)) == 8
        (failure,) = await content(keeper, batch.failures)
        assert b'"custom_id":"c3"' in failure and b'"status_code":400' in failure
        running.cancel()

    scenario(main)


def test_nothing_begins_while_others_wait(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper(Api(storage_dir=str(tmp_path)), 1)
        answers = Answers([1])
        answers.room = False
        running = asyncio.create_task(keeper.run(answers))
        await begin(keeper)
        await until(keeper, lambda batch: batch.status == "in_progress")
        await keeper.call(lambda store: None)
        assert answers.lines == []
        answers.room = True
        keeper.tell()
        assert (await until(keeper, ended)).done == 9
        running.cancel()

    scenario(main)


def test_a_successor_does_what_was_left_and_nothing_twice(tmp_path: Path) -> None:
    async def main() -> None:
        api = Api(storage_dir=str(tmp_path), batch_requests=5)
        first, answers = Keeper(api, 1), Answers([1])
        running = asyncio.create_task(first.run(answers))
        await begin(first)
        await until(first, lambda batch: batch.done > 0)
        answers.go_on.clear()
        running.cancel()  # as a kill: what it had stays its own
        await asyncio.wait([running])
        second, others = Keeper(api, 2), Answers([])
        running = asyncio.create_task(second.run(others))
        batch = await until(second, lambda batch: True)
        assert batch.status in ("in_progress", "completed")
        others._alive = [2]  # the scheduler has missed the first one
        batch = await until(second, ended)
        output = await content(second, batch.output)
        assert (batch.done, len(output), len(set(output))) == (9, 9, 9)
        running.cancel()

    scenario(main)


def test_what_was_not_begun_is_told_as_cancelled(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper(Api(storage_dir=str(tmp_path), batch_requests=2), 1)
        answers = Answers([1])
        answers.go_on.clear()
        running = asyncio.create_task(keeper.run(answers))
        await begin(keeper)
        async with asyncio.timeout(LIMIT_S):
            while answers.open < 2:
                await asyncio.sleep(0.005)
        assert await keeper.call(lambda store: store.work.cancel("b", "me"))
        answers.go_on.set()
        batch = await until(keeper, ended)
        assert (batch.status, batch.done) == ("cancelled", 2)
        failures = await content(keeper, batch.failures)
        assert len(failures) == 7 and all(b'"code":"batch_cancelled"' in line for line in failures)
        running.cancel()

    scenario(main)


@pytest.mark.parametrize(("text", "code"), [(b"{}\n", "invalid_json_line"), (b"", "empty_file")])
def test_an_input_that_cannot_be_used_ends_the_batch(tmp_path: Path, text: bytes, code: str) -> None:
    async def main() -> None:
        keeper = Keeper(Api(storage_dir=str(tmp_path)), 1)
        running = asyncio.create_task(keeper.run(Answers([1])))
        await begin(keeper, text)
        batch = await until(keeper, ended)
        assert batch.status == "failed" and code in batch.errors
        running.cancel()

    scenario(main)


def test_a_store_that_cannot_be_used_is_said_and_does_not_end_the_process(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "file").write_text("")
        keeper = Keeper(Api(storage_dir=str(tmp_path / "file" / "below")), 1)
        running = asyncio.create_task(keeper.run(Answers([1])))
        with pytest.raises(Reject, match="files and batches cannot be kept now"):
            await keeper.call(lambda store: store.work.begun())
        assert not running.done()
        running.cancel()

    scenario(main)


def test_a_disk_that_fails_for_a_while_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the input, an answer and the output each fail once."""
    monkeypatch.setattr("services.api.batches.keeper.AGAIN_S", 0.0)
    failed: list[str] = []

    def once(name: str) -> None:
        whole = getattr(Work, name)

        def first_fails(*arguments: Any) -> Any:
            if name not in failed:
                failed.append(name)
                raise OSError("no space left")
            return whole(*arguments)

        monkeypatch.setattr(Work, name, first_fails)

    async def main() -> None:
        keeper = Keeper(Api(storage_dir=str(tmp_path)), 1)
        for name in ("begin", "answer", "finish"):
            once(name)
        running = asyncio.create_task(keeper.run(Answers([1])))
        await begin(keeper)
        batch = await until(keeper, ended)
        assert (batch.status, batch.done, failed) == ("completed", 9, ["begin", "answer", "finish"])
        running.cancel()

    scenario(main)


def test_an_input_without_content_ends_the_batch(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper(Api(storage_dir=str(tmp_path)), 1)
        await begin(keeper)
        await keeper.call(lambda store: [store.files.path(file.id).unlink() for file in store.files.of("me")])
        running = asyncio.create_task(keeper.run(Answers([1])))
        batch = await until(keeper, ended)
        assert batch.status == "failed" and "is gone" in batch.errors
        running.cancel()

    scenario(main)
