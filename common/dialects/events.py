"""What a reader finds in a model's text, in order. Pure values; joined, they do not depend on how the text was cut."""

from typing import NamedTuple


class Reasoning(NamedTuple):
    text: str


class Content(NamedTuple):
    text: str


class CallBegun(NamedTuple):
    """A tool call whose name is known. `identity` is the model's own for it, or empty."""

    index: int
    name: str
    identity: str = ""


class Arguments(NamedTuple):
    """A piece of call `index`'s arguments, as JSON text."""

    index: int
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
            if event.index == last.index:
                joined[-1] = Arguments(event.index, last.text + event.text)
            else:
                joined.append(event)
        elif isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
    return joined
