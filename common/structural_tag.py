"""`structural_tag`, as xgrammar's users write it, in llguidance's dialect of Lark. Pure.

Both forms: `structures` with `triggers`, and `format`, a tree of formats by `type`. Text outside of tags is free until
a trigger; from there on one of the tags that begin with it must follow.
"""

import json
from collections.abc import Callable
from typing import Any

from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from common.schema_draft import check_draft

TEXT = "/(.|\\n)*/"
MAX_DEPTH = 32
MAX_RULES = 20_000
# One blank or one line end with indentation: with any number of them, a model of few talents writes nothing else.
WHITESPACE = r"[ \t]?|\r?\n[ \t]{0,80}"


def to_lark(text: str) -> str:
    """`text`: JSON of the tag. Raises ValueError that says what is wrong."""
    rules = _Rules()
    start = rules.of(tree_of(json.loads(text)), "format", 0)
    return "\n".join(["%llguidance {}", f"start: {start}", *rules.lines])


def tree_of(tag: Any) -> Any:
    """The format of a tag of either form. Raises ValueError."""
    if not isinstance(tag, dict):
        raise ValueError("structural_tag is no object")
    if "format" in tag:
        return tag["format"]
    if "structures" not in tag:
        raise ValueError("structural_tag has neither format nor structures")
    tags = [_of_old(each) for each in _list(tag, "structures", "structural_tag")]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _of_old(structure: Any) -> dict[str, Any]:
    if not isinstance(structure, dict):
        raise ValueError("structures: each is an object with begin, schema and end")
    content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
    return {"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end", "")}


def _list(values: dict[str, Any], name: str, where: str) -> list[Any]:
    found = values.get(name)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{where}.{name} is no list, or an empty one")
    return found


def _text(values: dict[str, Any], name: str, where: str) -> str:
    found = values.get(name)
    if not isinstance(found, str) or not found:
        raise ValueError(f"{where}.{name} is no text, or an empty one")
    return found


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


class _Rules:
    """The rules so far; `of` adds those of a format and gives the name of the first, or what stands for itself."""

    def __init__(self) -> None:
        self.lines: list[str] = [f"FREE: {TEXT}"]
        self._kinds: dict[str, Callable[[dict[str, Any], str, int], str]] = {
            "const_string": self._constant,
            "json_schema": self._json_schema,
            "regex": lambda at, where, _: self._regex(_text(at, "pattern", where)),
            "grammar": self._grammar,
            "any_text": lambda at, where, _: self._rule("FREE"),
            "sequence": lambda at, where, depth: self._rule(" ".join(self._all(at, where, depth))),
            "or": lambda at, where, depth: self._rule(" | ".join(self._all(at, where, depth))),
            "words": self._words,
            "members": self._members,
            "optional": lambda at, where, depth: self._rule(f"({self._content(at, where, depth)})?"),
            "star": lambda at, where, depth: self._rule(f"({self._content(at, where, depth)})*"),
            "plus": lambda at, where, depth: self._rule(f"({self._content(at, where, depth)})+"),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def of(self, at: Any, where: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise ValueError(f"structural_tag is nested deeper than {MAX_DEPTH} formats")
        kind = at.get("type") if isinstance(at, dict) else None
        make = self._kinds.get(kind) if isinstance(kind, str) else None
        if make is None:
            raise ValueError(f"{where}.type is none of {', '.join(self._kinds)}")
        return make(at, where, depth)

    def _name(self) -> str:
        if len(self.lines) > MAX_RULES:
            raise ValueError(f"structural_tag has more than {MAX_RULES} formats")
        return f"r{len(self.lines)}"

    def _rule(self, body: str, attribute: str = "") -> str:
        name = self._name()
        self.lines.append(f"{name}{attribute}: {body}")
        return name

    def _all(self, at: dict[str, Any], where: str, depth: int, name: str = "elements") -> list[str]:
        each = _list(at, name, where)
        return [self.of(element, f"{where}.{name}[{i}]", depth + 1) for i, element in enumerate(each)]

    @staticmethod
    def _constant(at: dict[str, Any], where: str, depth: int) -> str:
        if not isinstance(value := at.get("value"), str):
            raise ValueError(f"{where}.value is no text")
        return _quoted(value)

    def _words(self, at: dict[str, Any], where: str, depth: int) -> str:
        """One of `words`, of which there may be thousands: one terminal, since as many rules are more than a step may
        look at."""
        words = _list(at, "words", where)
        self.lines.append(f"W{len(self.lines)}: {' | '.join(_quoted(str(word)) for word in words)}")
        return f"W{len(self.lines) - 1}"

    def _members(self, at: dict[str, Any], where: str, depth: int) -> str:
        """`elements` in this order, those that are not in `required` (by place) or not; `separator` between any two."""
        names, separator = self._all(at, where, depth), _quoted(str(at.get("separator", "")))
        required = set(at.get("required", ()))
        first = later = ""  # what may follow if nothing came before, and if something did
        for place in reversed(range(len(names))):
            rest = f"{names[place]} {later}"
            optional = place not in required
            first, later = (
                self._rule(f"{rest} | {first}" if optional else rest),
                self._rule(f"{separator} {rest} | {later}" if optional else f"{separator} {rest}"),
            )
        return first

    def _content(self, at: dict[str, Any], where: str, depth: int) -> str:
        return self.of(at.get("content"), f"{where}.content", depth + 1)

    def _json_schema(self, at: dict[str, Any], where: str, depth: int) -> str:
        schema = at.get("json_schema", True)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError(f"{where}.json_schema is no schema that something matches")
        own = schema.get("x-guidance")
        options = {"whitespace_pattern": WHITESPACE, **(own if isinstance(own, dict) else {})}
        check_draft(schema | {"x-guidance": options})
        return self._rule(f"%json {json.dumps(schema | {'x-guidance': options}, ensure_ascii=False)}")

    def _regex(self, pattern: str) -> str:
        # A slash would end it, and in a class it needs no escape to mean itself.
        return self._rule("/" + pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n") + "/")

    def _grammar(self, at: dict[str, Any], where: str, depth: int) -> str:
        """A nested grammar keeps names of its own."""
        try:
            inner = any_to_lark(_text(at, "grammar", where))
        except GbnfToLarkError as error:
            raise ValueError(f"{where}.grammar: {error}") from error
        return self._rule(f"%lark {{\n{inner}\n}}")

    def _tag(self, at: dict[str, Any], where: str, depth: int, begun: str = "") -> str:
        """`begun`: the trigger, which has come already."""
        begin, end = at.get("begin"), at.get("end", "")
        if not isinstance(begin, str):
            raise ValueError(f"{where}.begin is no text")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not all(isinstance(each, str) for each in ends) or not ends:
            raise ValueError(f"{where}.end is neither a text nor a list of texts")
        content = at.get("content", {"type": "any_text"})
        opening = _quoted(begin[len(begun) :])
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            # up to the first end
            return self._rule(f"{opening} {TEXT} ({' | '.join(map(_quoted, ends))})", "[lazy]")
        inner = self.of(content, f"{where}.content", depth + 1)
        closing = " | ".join(_quoted(each) for each in ends if each)
        optional = "?" if "" in ends else ""
        return self._rule(f"{opening} {inner} ({closing}){optional}" if closing else f"{opening} {inner}")

    def _tags(self, at: dict[str, Any], where: str) -> list[dict[str, Any]]:
        tags = _list(at, "tags", where)
        for i, tag in enumerate(tags):
            if not isinstance(tag, dict):
                raise ValueError(f"{where}.tags[{i}] is no object")
            _text(tag, "begin", f"{where}.tags[{i}]")
        return tags

    def _triggered(self, at: dict[str, Any], where: str, depth: int) -> str:
        triggers, tags = _list(at, "triggers", where), self._tags(at, where)
        alternatives = []
        for j, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                raise ValueError(f"{where}.triggers[{j}] is no text, or an empty one")
            begun = [(i, tag) for i, tag in enumerate(tags) if tag["begin"].startswith(trigger)]
            if begun:
                bodies = [self._tag(tag, f"{where}.tags[{i}]", depth + 1, trigger) for i, tag in begun]
                before = self._rule(f"{TEXT} {_quoted(trigger)}", "[lazy]")
                alternatives.append(self._rule(f"{before} ({' | '.join(bodies)})"))
        for i, tag in enumerate(tags):
            if not any(isinstance(trigger, str) and tag["begin"].startswith(trigger) for trigger in triggers):
                raise ValueError(f"{where}.tags[{i}].begin starts with none of the triggers")
        one = f"({' | '.join(alternatives)})"
        if at.get("stop_after_first"):
            return self._rule(one if at.get("at_least_one") else f"{one} | FREE")
        return self._rule(f"{one}{'+' if at.get('at_least_one') else '*'} FREE")

    def _separated(self, at: dict[str, Any], where: str, depth: int) -> str:
        """A separator and what follows it are one word: alone it may be the beginning of another, which would win."""
        tags, separator = self._tags(at, where), at.get("separator", "")
        if not isinstance(separator, str):
            raise ValueError(f"{where}.separator is no text")
        rests = [self._tag(tag, f"{where}.tags[{i}]", depth + 1, tag["begin"]) for i, tag in enumerate(tags)]

        def each(before: str) -> str:
            begun = (_quoted(before + tag["begin"]) for tag in tags)
            return f"({' | '.join(f'{begin} {rest}' for begin, rest in zip(begun, rests, strict=True))})"

        body = each("") if at.get("stop_after_first") else f"{each('')} {each(separator)}*"
        return self._rule(body if at.get("at_least_one") else f"({body})?")
