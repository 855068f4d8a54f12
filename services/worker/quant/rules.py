"""Which matrices of a checkpoint are coded how: what a `quantization_config` says, as rules for names of modules.

`Settings` reads such a configuration: a key or a value that nobody here knows stops with its name, since passing it
over would compute something else. Readers of single tools: detect.py, detect_groups.py.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from common.errors import ConfigError
from services.worker.quant.scheme import Scheme

T = TypeVar("T")
REQUIRED = object()


@dataclass(frozen=True)
class Rule:
    """`how` names are meant: "name" (whole, or a part of the way to it), "regex", "glob", "within" (anywhere), or
    "weight" (a regex for the whole name, of the module or of its weight)."""

    pattern: str
    how: str
    scheme: Scheme | None  # None: modules of that name are not coded

    def matches(self, module: str) -> bool:
        if self.how == "regex":
            return re.match(self.pattern, module) is not None
        if self.how == "glob":
            return fnmatch.fnmatchcase(module, self.pattern)
        if self.how == "weight":
            return any(re.fullmatch(self.pattern, name) for name in (module, f"{module}.weight"))
        if self.how == "within":
            return self.pattern in module
        return f".{self.pattern}." in f".{module}."


@dataclass(frozen=True)
class Rules:
    """The first rule that matches, else `default`. `method`: the tool's name."""

    method: str
    default: Scheme | None = None
    rules: Sequence[Rule] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """module: as the checkpoint names it, without ".weight"."""
        return next((rule.scheme for rule in self.rules if rule.matches(module)), self.default)

    @property
    def schemes(self) -> list[Scheme]:
        found = [rule.scheme for rule in self.rules] + [self.default]
        return list(dict.fromkeys(scheme for scheme in found if scheme is not None))


def named(patterns: Iterable[str], how: str = "name", scheme: Scheme | None = None) -> list[Rule]:
    """A rule each; one that begins with "re:" is a regular expression."""
    return [
        Rule(text.removeprefix("re:"), "regex" if text.startswith("re:") else how, scheme) for text in patterns if text
    ]


class Settings:
    """One table of a `quantization_config`. `where`: file and path of keys, for errors, which are ConfigErrors."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.where = where
        self._values = values
        self._asked: set[str] = set()

    def get(self, kind: type[T], key: str, default: object = REQUIRED) -> T:
        """Absent or null: the default."""
        self._asked.add(key)
        value = self._values.get(key)
        value = default if value is None else value
        if value is REQUIRED:
            raise ConfigError(f"{self.where}: {key!r} is missing")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: {key!r} is {value!r}, expected {kind.__name__}")
        return value

    def require(self, key: str, *allowed: object) -> None:
        """Unless it is absent, null or one of these."""
        self._asked.add(key)
        value = self._values.get(key)
        if value is not None and value not in allowed:
            known = ", ".join(repr(one) for one in allowed) or "none"
            raise ConfigError(f"{self.where}: {key!r} is {value!r}, supported: {known}")

    def empty(self, *keys: str) -> None:
        """What they hold is not supported, whatever it is."""
        for key in keys:
            self._asked.add(key)
            if value := self._values.get(key):
                raise ConfigError(f"{self.where}: {key!r} is {value!r}, which is not supported")

    def names(self, key: str) -> list[str]:
        listed = self.get(list, key, [])
        if wrong := [name for name in listed if not isinstance(name, str)]:
            raise ConfigError(f"{self.where}: {key!r} lists {wrong[0]!r}, expected names")
        for name in listed:
            try:
                re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
            except re.error as error:
                raise ConfigError(f"{self.where}: {key!r} lists {name!r}, which is no regular expression") from error
        return listed

    def table(self, key: str) -> "Settings | None":
        """A table within; None where it is absent, null or empty."""
        values = self.get(dict, key, {})
        return Settings(values, f"{self.where}.{key}") if values else None

    def tables(self, key: str) -> dict[str, "Settings"]:
        """Of a table of tables."""
        found = self.tables_or_none(key)
        for name, table in found.items():
            if table is None:
                raise ConfigError(f"{self.where}.{key}: {name!r} is None, expected a table")
        return {name: table for name, table in found.items() if table is not None}

    def tables_or_none(self, key: str) -> dict[str, "Settings | None"]:
        """Of a table of tables, some of which may be null."""
        found: dict[str, Settings | None] = {}
        for name, values in self.get(dict, key, {}).items():
            if values is not None and not isinstance(values, dict):
                raise ConfigError(f"{self.where}.{key}: {name!r} is {values!r}, expected a table")
            found[str(name)] = None if values is None else Settings(values, f"{self.where}.{key}.{name}")
        return found

    def finish(self, *harmless: str) -> None:
        """Raises for a key that nobody asked for, and that says nothing about how numbers are coded."""
        unknown = sorted(set(self._values) - self._asked - set(harmless))
        if unknown:
            raise ConfigError(f"{self.where}: {unknown[0]!r} is not known: {self._values[unknown[0]]!r}")
