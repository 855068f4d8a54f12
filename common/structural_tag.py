"""`structural_tag`, as xgrammar's users write it, in llguidance's dialect of Lark. Pure.

Both forms: `structures` with `triggers`, and `format`, a tree of formats by `type`. Text outside of tags is free until
a trigger; from there on one of the tags that begin with it must follow.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

TEXT = "/(.|\\n)*/"
MAX_DEPTH = 32
MAX_RULES = 2000


def to_lark(text: str) -> str:
    """`text`: JSON of the tag. Raises ValueError that says what is wrong."""
    tag = json.loads(text)
    if not isinstance(tag, dict):
        raise ValueError("structural_tag is no object")
    if "format" in tag:
        tree = tag["format"]
    elif "structures" in tag:
        tags = [_of_old(each) for each in _list(tag, "structures", "structural_tag")]
        tree = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    else:
        raise ValueError("structural_tag has neither format nor structures")
    rules = _Rules()
    start = rules.of(tree, "format", 0)
    return "\n".join(["%llguidance {}", f"start: {start}", *rules.lines])


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
    """The rules so far; `of` adds those of a format and gives the name of the first."""

    def __init__(self) -> None:
        self.lines: list[str] = [f"FREE: {TEXT}"]
        self._kinds: dict[str, Callable[[dict[str, Any], str, int], str]] = {
            "const_string": lambda at, where, _: self._rule(_quoted(_text(at, "value", where))),
            "json_schema": self._json_schema,
            "regex": lambda at, where, _: self._regex(_text(at, "pattern", where)),
            "grammar": self._grammar,
            "any_text": lambda at, where, _: self._rule("FREE"),
            "sequence": lambda at, where, depth: self._rule(" ".join(self._all(at, where, depth))),
            "or": lambda at, where, depth: self._rule(" | ".join(self._all(at, where, depth))),
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

    def _json_schema(self, at: dict[str, Any], where: str, depth: int) -> str:
        return self._rule(f"%json {json.dumps(at.get('json_schema', True), ensure_ascii=False)}")

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
        begin, end = _text(at, "begin", where), at.get("end", "")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not all(isinstance(each, str) for each in ends) or not ends:
            raise ValueError(f"{where}.end is neither a text nor a list of texts")
        content = at.get("content", {"type": "any_text"})
        opening = _quoted(begin[len(begun) :])
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            # up to the first end
            body = self._rule(f"{TEXT} ({' | '.join(map(_quoted, ends))})", "[lazy]")
            return self._rule(f"{opening} {body}")
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
        tags = [self._tag(tag, f"{where}.tags[{i}]", depth + 1) for i, tag in enumerate(self._tags(at, where))]
        one, separator = f"({' | '.join(tags)})", at.get("separator", "")
        if not isinstance(separator, str):
            raise ValueError(f"{where}.separator is no text")
        body = one if at.get("stop_after_first") else f"{one} ({_quoted(separator)} {one})*"
        return self._rule(body if at.get("at_least_one") else f"({body})?")


def tool_calls(tools: Sequence[tuple[str, Any]], begin: Callable[[str], str], end: str, most: int = 0) -> str:
    """A structural tag whose every text is one or more calls of `tools` (name, JSON schema of the arguments).

    `begin(name)` and `end` are what the model's dialect writes around the arguments. `most` 1: exactly one call.
    """
    tags = [
        {"type": "tag", "begin": begin(name), "content": {"type": "json_schema", "json_schema": schema}, "end": end}
        for name, schema in tools
    ]
    tree = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    return json.dumps({"type": "structural_tag", "format": tree | {"stop_after_first": most == 1}})
