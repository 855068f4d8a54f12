"""Multiple choice, with a made-up task and a server that scores by a rule."""

import asyncio
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from benchmarks.choices import Outcome, choose_all, read, table_of

EXAMPLES = [
    {"input": f"Which of these is number {number}? ", "target_scores": {"no": 0, f"it is {number}": 1, "nor this": 0}}
    for number in range(10)
]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path, content = tmp_path / "tasks.tar.gz", json.dumps({"examples": EXAMPLES}).encode()
    with tarfile.open(path, "w:gz") as file:
        for name in ("numbers", "sets/two", "others"):
            member = tarfile.TarInfo(f"made-1/made/benchmark_tasks/{name}/task.json")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def test_questions_are_spread_over_each_task(archive: Path) -> None:
    questions = read(archive, ("numbers", "sets/two"), 3)
    assert [each.task for each in questions] == ["numbers"] * 3 + ["sets/two"] * 3
    assert [each.choices[1] for each in questions[:3]] == ["it is 0", "it is 3", "it is 6"]
    assert questions[0].context == "Question: Which of these is number 0?\nAnswer:" and questions[0].right == {1}
    with pytest.raises(ValueError, match="lacks missing"):
        read(archive, ("numbers", "missing"), 3)


def answer(request: httpx.Request) -> httpx.Response:
    """A token per word. Those of questions are far worse than any choice; `it is N` has the least per byte of choices
    about even numbers, and of others the largest sum only is that of "no", the first."""
    asked: dict[str, Any] = json.loads(request.content)
    assert asked["echo"] and asked["max_tokens"] == 0
    choices = []
    for index, prompt in enumerate(asked["prompt"]):
        start, choice = prompt.index("Answer:") + len("Answer:"), prompt.partition("Answer: ")[2]
        even = int(prompt.partition("number ")[2][0]) % 2 == 0
        score = -0.1 * len(choice) if choice.startswith("it is") and even else -0.2 * len(choice)
        own = {"text_offset": [0, 9, start], "token_logprobs": [None, -50.0 * index, score]}
        choices.append({"index": index, "logprobs": own})
    return httpx.Response(200, json={"choices": choices[::-1]})


def test_choices_are_scored_by_their_own_bytes(archive: Path) -> None:
    questions, done = read(archive, ("numbers",), 10), []

    async def take() -> list[int]:
        async with httpx.AsyncClient(base_url="http://made", transport=httpx.MockTransport(answer)) as client:
            return await choose_all(client, questions, lambda: done.append(1))

    taken = asyncio.run(take())
    assert taken == [1, 0] * 5 and len(done) == 10
    console = Console(width=200, file=io.StringIO())
    console.print(table_of(questions, [Outcome("exact", taken), Outcome("other", [1] * 10)]))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    rows = [row for row in lines if len(row) == 5]
    assert rows[0] == ["exact", "50.0", "15.8", "100.0", "50 of 10"]
    assert rows[1] == ["other", "100.0", "0.0", "50.0", "100 of 10"]
    assert rows[2][:2] == ["chance", "33.3"]
