"""The input of a batch: one JSON object a line, checked one by one. Pure but for the file it is given."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

MAX_NAME = 512  # characters of a custom_id
MAX_PROBLEMS = 20  # told about one input


class Asked(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class Problem(msgspec.Struct, frozen=True):
    """What is wrong with one line, in OpenAI's form. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BadInput(Exception):
    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems)
        self.problems = problems


DECODER = msgspec.json.Decoder(Asked)
OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read(path: Path, endpoint: str, most_lines: int, most_bytes: int) -> Iterator[tuple[int, str, bytes]]:
    """(line, custom_id, body) of every request. Raises BadInput at its end, or as soon as there are many problems.

    `most_bytes`: of one line. Empty lines do not count.
    """
    problems: list[Problem] = []
    names: set[str] = set()
    number = 0
    with path.open("rb") as file:
        while raw := file.readline(most_bytes + 1):
            number += 1
            if len(raw) > most_bytes:
                raise BadInput(
                    [*problems, Problem("line_too_long", f"a line has more than {most_bytes} bytes", number)]
                )
            if not raw.strip():
                continue
            found = _checked(raw, endpoint, names)
            if isinstance(found, Asked):
                names.add(found.custom_id)
                yield number, found.custom_id, bytes(found.body)
            else:
                problems.append(msgspec.structs.replace(found, line=number))
            if len(names) > most_lines:
                raise BadInput([Problem("too_many_requests", f"a batch has at most {most_lines} requests")])
            if len(problems) >= MAX_PROBLEMS:
                break
    if not names and not problems:
        problems = [Problem("empty_file", "the input has no requests")]
    if problems:
        raise BadInput(problems)


def _checked(raw: bytes, endpoint: str, names: set[str]) -> Asked | Problem:
    try:
        asked = DECODER.decode(raw)
        body = OBJECT.decode(asked.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Problem("invalid_json_line", f"a line must be an object with custom_id, method, url and body: {error}")
    if not 0 < len(asked.custom_id) <= MAX_NAME:
        return Problem("invalid_custom_id", f"custom_id has 1 to {MAX_NAME} characters", param="custom_id")
    if asked.custom_id in names:
        return Problem("duplicate_custom_id", "another line has this custom_id", param="custom_id")
    if asked.method != "POST":
        return Problem("invalid_method", "method must be POST", param="method")
    if asked.url != endpoint:
        return Problem("mismatched_endpoint", f"url must be that of the batch, {endpoint}", param="url")
    if msgspec.json.decode(body.get("stream", msgspec.Raw(b"null"))) not in (None, False):
        return Problem("invalid_request", "a request of a batch cannot stream", param="body.stream")
    return asked
