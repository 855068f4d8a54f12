"""A form that comes in pieces of any size, and one that comes too slowly."""

import asyncio
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from common.config import Api
from services.api import upload

CONTENT = b"line\r\n--not the end\r\n" * 50
FORM = (
    b'--b0\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b0\r\nContent-Disposition: form-data; name="file"; filename="../a.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    + CONTENT
    + b"\r\n--b0--\r\n"
)


def request(pieces: list[bytes], pause_s: float = 0.0) -> Request:
    left = list(pieces)

    async def receive() -> Message:
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    scope = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=b0")]}
    return Request(scope, receive)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_any_cut_gives_the_same(tmp_path: Path, size: int) -> None:
    pieces = [FORM[start : start + size] for start in range(0, len(FORM), size)]
    path = tmp_path / "file"
    form = asyncio.run(upload.receive(request(pieces), Api(), path))
    assert (form.fields, form.filename, path.read_bytes()) == ({"purpose": "batch"}, "../a.jsonl", CONTENT)


def test_who_sends_too_slowly_is_ended(tmp_path: Path) -> None:
    pieces = [FORM[:50], FORM[50:60], FORM[60:]]
    with pytest.raises(HTTPException) as caught:
        asyncio.run(upload.receive(request(pieces, pause_s=0.03), Api(max_body_s=0.05), tmp_path / "file"))
    assert caught.value.status_code == 408


def test_who_sends_fast_enough_has_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "LEAST_RATE", 1)
    pieces = [FORM[:50], FORM[50:60], FORM[60:]]
    form = asyncio.run(upload.receive(request(pieces, pause_s=0.03), Api(max_body_s=0.05), tmp_path / "file"))
    assert form.filename == "../a.jsonl"
