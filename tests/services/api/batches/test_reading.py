"""Inputs of batches: what is taken, and every line that is wrong is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.api.batches.reading import MAX_PROBLEMS, BadInput, read

URL = "/v1/chat/completions"


def line(name: str = "a", **other: Any) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": {"x": 1}} | other).encode()


def reading(folder: Path, *lines: bytes, most: int = 100, most_bytes: int = 1000) -> list[tuple[int, str, bytes]]:
    path = folder / "input"
    path.write_bytes(b"\n".join(lines))
    return list(read(path, URL, most, most_bytes))


def problems(folder: Path, *lines: bytes, **limits: int) -> list[tuple[str, int | None, str | None]]:
    with pytest.raises(BadInput) as caught:
        reading(folder, *lines, **limits)
    return [(problem.code, problem.line, problem.param) for problem in caught.value.problems]


def test_lines_and_their_numbers(tmp_path: Path) -> None:
    assert reading(tmp_path, line("a"), b"", line("b", body={"stream": False}), b"  ") == [
        (1, "a", b'{"x": 1}'),
        (3, "b", b'{"stream": false}'),
    ]


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (line(body=3), "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (b"[" * 900, "invalid_json_line", None),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 513), "invalid_custom_id", "custom_id"),
        (line("a"), "duplicate_custom_id", "custom_id"),
        (line("b", method="GET"), "invalid_method", "method"),
        (line("b", url="/v1/completions"), "mismatched_endpoint", "url"),
        (line("b", body={"stream": True}), "invalid_request", "body.stream"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, wrong: bytes, code: str, param: str | None) -> None:
    assert problems(tmp_path, line("a"), wrong, line("c")) == [(code, 2, param)]


def test_limits(tmp_path: Path) -> None:
    assert problems(tmp_path) == problems(tmp_path, b"\n\n") == [("empty_file", None, None)]
    assert problems(tmp_path, line("a"), line("b"), most=1) == [("too_many_requests", None, None)]
    assert problems(tmp_path, line("a"), line("b", body={"long": "x" * 1000})) == [("line_too_long", 2, None)]
    assert len(problems(tmp_path, *[b"{"] * 100)) == MAX_PROBLEMS
