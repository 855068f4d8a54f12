"""What a reader finds in a model's text, in order. Pure values; joined, they do not depend on how the text was cut."""

from typing import NamedTuple


class Reasoning(NamedTuple):
    text: str


class Content(NamedTuple):
    text: str


class CallBegun(NamedTuple):
    """A tool call, by its number, whose name is known. `identity` is the model's own for it, or empty."""

    call: int
    name: str
    identity: str = ""


class Arguments(NamedTuple):
    """A piece of that call's arguments, as JSON text."""

    call: int
    text: str


Event = Reasoning | Content | CallBegun | Arguments


def merged(events: list[Event]) -> list[Event]:
    """The same with neighbours joined: equal for equal texts, however they were cut."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, CallBegun) or type(last) is not type(event):
            joined.append(event)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            if event.call == last.call:
                joined[-1] = Arguments(event.call, last.text + event.text)
            else:
                joined.append(event)
        elif isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
    return joined
