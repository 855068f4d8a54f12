"""JSON bodies to structs, and msgspec's complaints to refusals that name the field. Pure.

Owns the set of unknown field names that were logged already: an unknown field is accepted, and told once per name.
"""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from common.errors import Reject
from services.api.errors import invalid

log = logging.getLogger("api")
T = TypeVar("T", bound=msgspec.Struct)
PATH = re.compile(r"(.*) - at (?:`key` in )?`\$(.*)`$", re.DOTALL)
RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
ANY = msgspec.json.Decoder()
MAX_UNKNOWN_NAMES = 256
FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
MAX_DEPTH = 64
Harmless = Callable[[Any], bool]


def one_of(*values: Any) -> Harmless:
    """True for null and for these values; a bool is no int here."""
    return lambda value: value is None or any(value is v or (value == v and type(value) is type(v)) for v in values)


def anything(_: Any) -> bool:
    return True


def check_depth(value: Any, param: str) -> None:
    """Raises Reject if JSON without a schema is nested deeper than MAX_DEPTH: templates walk it recursively."""
    level, depth = [value], 0
    while level:
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        depth += 1
        if depth >= MAX_DEPTH and level:
            raise invalid(f"{param} is nested deeper than {MAX_DEPTH} levels", param)


class Body(Generic[T]):
    """How one endpoint reads its body. `unsupported` names fields that exist elsewhere, with their harmless values."""

    def __init__(self, struct: type[T], unsupported: Mapping[str, Harmless] | None = None) -> None:
        self.struct = struct
        self.unsupported = unsupported or {}
        self._decode = msgspec.json.Decoder(struct).decode
        self._known = {field.encode_name for field in msgspec.structs.fields(struct)}
        self._told: set[str] = set()

    def parse(self, body: bytes) -> T:
        """The struct. Raises Reject (INVALID) with `param` set where a field is at fault."""
        try:
            body.decode()
            fields = RAW.decode(body)
            for name in fields.keys() - self._known:
                self._surplus(name, fields[name])
            return self._decode(body)
        except UnicodeDecodeError as error:
            raise invalid(f"the body is not UTF-8 at byte {error.start}") from error
        except msgspec.ValidationError as error:
            raise explain(error) from error
        except msgspec.DecodeError as error:
            raise invalid(f"the body is not valid JSON: {error}") from error
        except RecursionError as error:
            raise invalid("the body is nested too deeply") from error

    def _surplus(self, name: str, raw: msgspec.Raw) -> None:
        if name in self.unsupported:
            if not self.unsupported[name](ANY.decode(raw)):
                raise invalid(f"{name} is not supported by this server", name)
        elif name not in self._told and len(self._told) < MAX_UNKNOWN_NAMES:
            self._told.add(name)
            shown = name if FIELD_NAME.fullmatch(name) else "(no name of a field)"  # it may be anything
            log.warning("unknown field %r of %s is ignored", shown, self.struct.__name__)


def explain(error: msgspec.ValidationError) -> Reject:
    """`Expected ... - at `$.a[0].b`` as a refusal with the parameter `a[0].b`."""
    if found := PATH.match(str(error)):
        param = found[2].lstrip(".").removesuffix("[...]") or None
        return invalid(f"{param}: {found[1]}" if param else found[1], param)
    text = str(error)
    if missing := re.match(r"Object missing required field `(.*)`$", text):
        return invalid(f"{missing[1]} is required", missing[1])
    return invalid(f"the body is not what is expected: {text}")
