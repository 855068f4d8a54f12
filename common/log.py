"""Structured logs: one line per event with time, level, process, request id. Prompts and outputs are never logged.

Texts of exceptions are left out where they may quote a request, as KeyError's does; also of those that nobody caught.
"""

import logging
import re
import sys
import threading
import traceback
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from common.errors import ConfigError

# What we or the system raise with our own words.
SPEAKING = (AssertionError, RuntimeError, MemoryError, OSError, ImportError, ConfigError)
MAX_CHAIN = 8
FIRST_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")


def describe(error: BaseException) -> str:
    """A traceback as Python prints it, oldest exception first, without texts that may quote a request."""
    parts: list[str] = []
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen and len(seen) < MAX_CHAIN:
        seen.add(id(current))
        text = f": {current}" if isinstance(current, SPEAKING) else " (its text may quote a request and is not logged)"
        stack = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{stack}{type(current).__qualname__}{text}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\nwhich led to\n".join(reversed(parts))


def words_of(context: Mapping[str, Any]) -> str:
    """What asyncio says about a fault, without the values that it puts into its message."""
    found = FIRST_WORDS.match(str(context.get("message", "")))
    return found[0].strip() if found else ""


class Discreet(logging.Formatter):
    def formatException(self, ei: Any) -> str:
        return describe(ei[1]) if ei[1] is not None else ""


class DiscreetJson(JsonFormatter):
    """Lines for programs."""

    formatException = Discreet.formatException


class TextFormatter(Discreet):
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
        handler.setFormatter(DiscreetJson(fields, static_fields={"process": process}, json_ensure_ascii=False))
    else:
        handler.setFormatter(TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    sys.excepthook = _on_exception
    threading.excepthook = _on_exception_in_thread
    sys.unraisablehook = _on_unraisable


LEVELS = ("debug", "info", "warning", "error")


def follow(level: str) -> None:
    """Takes the level that an administrator has asked for; empty, or none that is known: nothing changes."""
    root = logging.getLogger()
    if level in LEVELS and root.level != logging.getLevelNamesMapping()[level.upper()]:
        root.setLevel(level.upper())
        logging.getLogger("log").warning("the level is %s now", level)


def _on_exception(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
    logging.getLogger("fault").critical("nobody caught this", exc_info=error)


def _on_exception_in_thread(arguments: threading.ExceptHookArgs) -> None:
    name = arguments.thread.name if arguments.thread else "a thread"
    logging.getLogger("fault").critical("nobody caught this in %s", name, exc_info=arguments.exc_value)


def _on_unraisable(found: Any) -> None:
    """The interpreter's own message would show the object."""
    logging.getLogger("fault").error("a fault that cannot be raised", exc_info=found.exc_value)
