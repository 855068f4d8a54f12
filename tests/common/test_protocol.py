"""The wire form, its evolution rule, and that docs/protocol.md tells the same story as the code."""

import inspect
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import protocol
from common.protocol import PROTOCOL_VERSION, StepPlan, TextBatch, api_of, make_seq_id, tokenizer_of

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/protocol.md").read_text()
UNIONS = {name: getattr(protocol, name) for name in ("ToApi", "ToTokenizer", "ToScheduler", "ToWorker", "ToAdmin")}
STRUCTS = [
    value
    for value in vars(protocol).values()
    if inspect.isclass(value) and issubclass(value, msgspec.Struct) and value.__name__ not in ("Struct", "Message")
]
MESSAGES = [struct for struct in STRUCTS if issubclass(struct, protocol.Message)]


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1))
def test_routing_is_inside_the_sequence_id(api: int, tokenizer: int, salt: int, counter: int) -> None:
    seq_id = make_seq_id(api, tokenizer, salt, counter)
    assert 0 <= seq_id < 2**64
    assert (api_of(seq_id), tokenizer_of(seq_id), seq_id >> 32 & 0xFFFF, seq_id & 0xFFFFFFFF) == (
        api,
        tokenizer,
        salt,
        counter,
    )


def test_every_message_has_a_receiver() -> None:
    received = {message for union in UNIONS.values() for message in get_args(union)}
    assert received == set(MESSAGES)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_structs_are_frozen_arrays(struct: type[msgspec.Struct]) -> None:
    assert struct.__struct_config__.frozen
    assert struct.__struct_config__.array_like


def test_an_older_sender_without_appended_fields_is_understood() -> None:
    full = msgspec.msgpack.decode(msgspec.msgpack.encode(StepPlan(step=5)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(full[:2]), type=StepPlan) == StepPlan(step=5)


def test_a_newer_sender_with_more_fields_is_understood() -> None:
    batch = TextBatch(b"", b"", b"", ["x"], [])
    longer = [*msgspec.msgpack.decode(msgspec.msgpack.encode(batch)), "later", 1]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(longer), type=TextBatch) == batch


def documented(section: str) -> dict[str, list[str]]:
    """Structs of a section of the document with their fields in order: headings `### Name`, table rows `| field |`."""
    found: dict[str, list[str]] = {}
    text = re.split(rf"^## {section}$", DOCUMENT, flags=re.MULTILINE)[1].split("\n## ")[0]
    for block in text.split("\n### ")[1:]:
        name = block.split("\n", 1)[0].strip()
        found[name] = re.findall(r"^\| `(\w+)` \|", block, flags=re.MULTILINE)
    return found


@pytest.mark.parametrize(("section", "kind"), [("Messages", True), ("Values", False)])
def test_the_document_lists_every_field_in_order(section: str, kind: bool) -> None:
    structs = [struct for struct in STRUCTS if (struct in MESSAGES) is kind]
    assert documented(section) == {struct.__name__: list(struct.__struct_fields__) for struct in structs}


def test_the_document_tells_version_and_receivers() -> None:
    assert f"Protocol version: **{PROTOCOL_VERSION}**" in DOCUMENT
    for name, union in UNIONS.items():
        row = re.search(rf"^\| `{name}` \|(.*)\|$", DOCUMENT, flags=re.MULTILINE)
        assert row
        assert re.findall(r"`(\w+)`", row[1]) == [message.__name__ for message in get_args(union)]
