"""A form with one file: the file's content goes to the disk as it comes, its fields are kept.

Bounded in bytes, in fields and in time: a client must send at a least rate once the time for an ordinary body is over.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import Request

from common.config import Api
from services.api.errors import invalid

LEAST_RATE = 100_000  # bytes per second
MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
MAX_NAME = 255
OVERHEAD_BYTES = 64 * 1024  # what surrounds the file in its form


class Form:
    """What has come so far. `fields`: all but the file. Used by one request, from the event loop."""

    def __init__(self, boundary: bytes, file: BinaryIO) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.complete = False
        self._file = file
        self._header, self._value = b"", b""
        self._disposition = b""
        self._name = ""
        self._part: bytearray | None = None  # of a field; None: of the file
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header,
            "on_header_value": self._on_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._start,
            "on_part_data": self._take,
            "on_part_end": self._end,
            "on_end": self._close,
        }
        self.parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def _begin(self) -> None:
        self._disposition = b""

    def _on_header(self, content: bytes, start: int, end: int) -> None:
        self._header = self._bounded(self._header + content[start:end])

    def _on_value(self, content: bytes, start: int, end: int) -> None:
        self._value = self._bounded(self._value + content[start:end])

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _start(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise invalid("a part of the form has no name")
        self._name = options[b"name"].decode(errors="replace")
        if self._name == "file":
            if self.filename is not None:
                raise invalid("the form has several files", "file")
            self.filename = options.get(b"filename", b"").decode(errors="replace")[-MAX_NAME:] or "file"
            self._part = None
        elif len(self.fields) == MAX_FIELDS:
            raise invalid(f"the form has more than {MAX_FIELDS} fields")
        else:
            self._part = bytearray()

    def _take(self, content: bytes, start: int, end: int) -> None:
        if self._part is None:
            self._file.write(memoryview(content)[start:end])
        else:
            self._part = bytearray(self._bounded(bytes(self._part + content[start:end])))

    def _end(self) -> None:
        if self._part is not None:
            self.fields[self._name] = self._part.decode(errors="replace")

    def _close(self) -> None:
        self.complete = True

    def _bounded(self, content: bytes) -> bytes:
        if len(content) > MAX_FIELD_BYTES:
            raise invalid(f"a field of the form has more than {MAX_FIELD_BYTES} bytes")
        return content


async def receive(request: Request, api: Api, path: Path) -> Form:
    """The form; its file is at `path`, complete, though perhaps not on the disk. Raises Reject and HTTPException."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 256:
        raise invalid("send a form: content-type multipart/form-data, with the fields file and purpose")
    with path.open("xb") as file:
        form = Form(boundary, file)
        await _feed(request, api, form)
    if form.filename is None:
        raise invalid("the field file is required", "file")
    return form


async def _feed(request: Request, api: Api, form: Form) -> None:
    limit, received, more = api.max_file_bytes + OVERHEAD_BYTES, 0, True
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    try:
        async with asyncio.timeout(api.max_body_s) as patience:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise invalid("the client has gone")
                part, more = message.get("body", b""), message.get("more_body", False)
                received += len(part)
                if received > limit:
                    raise HTTPException(413, f"the file exceeds the limit of {api.max_file_bytes} bytes")
                form.parser.write(part)
                patience.reschedule(start_s + api.max_body_s + received / LEAST_RATE)
            if not form.complete:
                raise invalid("the form has no end")
    except TimeoutError as error:
        raise HTTPException(408, "the form came too slowly", {"connection": "close"}) from error
    except FormParserError as error:
        raise invalid(f"the form cannot be read: {error}") from error
