"""Structured logs: one line per event with time, level, process, request id. Prompts and outputs are never logged."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

from pythonjsonlogger.json import JsonFormatter


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO api-0 [req 7f..] message` for people."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process} %(request)s%(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", "")
        record.request = f"[req {request_id}] " if request_id else ""
        return super().format(record)


class RequestLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds one request's id to every line: `RequestLogger(log, "chatcmpl-12")`."""

    def __init__(self, logger: logging.Logger, request_id: str) -> None:
        super().__init__(logger, {"request_id": request_id})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **kwargs.get("extra", {})}
        return msg, kwargs


def set_up(process: str, level: str, form: str) -> None:
    """Sends all logging of this process to stderr. `process` is like "api-0"; `form` is "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        fields = "%(asctime)s %(levelname)s %(name)s %(message)s"
        handler.setFormatter(JsonFormatter(fields, static_fields={"process": process}, json_ensure_ascii=False))
    else:
        handler.setFormatter(TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
