"""What a dialect is, and the script that most of them share: content with calls between markers. Pure."""

from collections.abc import Callable
from typing import NamedTuple

from common.dialects.forms import Form
from common.dialects.scanner import Malformed, Scanner, Script
from common.dialects.tools import Tools


class ToolDialect(NamedTuple):
    """How a family of models calls tools."""

    name: str
    signs: tuple[tuple[str, ...], ...]  # of its chat templates: all strings of any group are in them
    markers: tuple[str, ...]  # what may be special tokens, which would not be shown otherwise
    read: Callable[[Scanner, Tools], Script[None]]
    forms: tuple[Form, ...]  # in which it writes calls; the first one says whether text may stand before them
    model_types: tuple[str, ...] = ()  # `model_type` in config.json begins so: this dialect, whatever the template
    short_ids: bool = False  # its templates take only ids of nine letters and digits


class ReasoningDialect(NamedTuple):
    """How a family of models sets its reasoning apart. A prompt that ends in `begin` has begun it already."""

    name: str
    signs: tuple[tuple[str, ...], ...]
    begin: str
    end: str
    calls: tuple[str, ...] = ()  # markers of calls that end it, too
    markers: tuple[str, ...] = ()  # besides begin and end
    written: tuple[str, str] | None = None  # how a model begins and ends it, where that is not begin and end


def marked(
    scanner: Scanner,
    openings: tuple[str, ...],
    closings: tuple[str, ...],
    read: Callable[[], Script[None]],
    section: tuple[str, ...] = (),
) -> Script[None]:
    """Content, and calls between markers. `read` takes what is between, and commits or is Malformed.

    `section`: markers around all calls, the last one behind them. What else stands between the markers is content.
    """
    found = yield from scanner.until(scanner.content.add, *openings, *section)
    while found:
        if found in openings:
            scanner.open(found)
            try:
                yield from read()
            except Malformed:
                scanner.give_up()
            else:
                while (yield from scanner.spaces()) or (yield from scanner.skip("}", "]")):
                    pass  # a bracket too many is a common slip
                found = yield from scanner.until(scanner.content.add, *closings, *openings)
                if found in openings:
                    continue  # the closing marker was forgotten
        elif not scanner.calls or found != section[-1]:
            scanner.content.held += found  # part of the format if a call follows
        found = yield from scanner.until(scanner.content.add, *openings, *section)
