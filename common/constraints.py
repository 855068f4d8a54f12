"""What a request's output must match, and what may go wrong with it, as messages carry them (common/protocol.py)."""

from typing import Literal

import msgspec


class Grammar(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the output must match. The tokenizer has checked `text`; common/grammar.py gives it its meaning."""

    kind: Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
    text: str  # JSON for json_schema, choice (a list of strings) and structural_tag
    param: str = ""  # the request's field that it came from


class RowFault(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A row whose token means nothing, for a reason of its own. Its KV is right."""

    place: int  # in the plan's rows
    message: str = ""  # its request ends with it; empty: the row is to start again, its grammar is being prepared


class ToolUse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How an answer may call tools, whose schemas are in the template's arguments."""

    names: tuple[str, ...]  # those that it may call
    strict: tuple[str, ...] = ()  # those whose arguments match their schemas in every point, or the request is refused
    must: bool = False  # it is one call or more, and nothing else
    many: bool = True  # more than one
