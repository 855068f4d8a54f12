from common.dialects.events import Arguments, CallBegun, Content, Event, Reasoning, merged


def test_neighbours_are_joined() -> None:
    events: list[Event] = [Reasoning("a"), Reasoning("b"), Content("c"), Content("d"), CallBegun(0, "f")]
    events += [Arguments(0, "{"), Arguments(0, "}"), CallBegun(1, "g"), CallBegun(2, "h"), Arguments(2, "{}")]
    assert merged(events) == [
        *(Reasoning("ab"), Content("cd"), CallBegun(0, "f"), Arguments(0, "{}")),
        *(CallBegun(1, "g"), CallBegun(2, "h"), Arguments(2, "{}")),
    ]
    assert merged([Arguments(0, "a"), Arguments(1, "b")]) == [Arguments(0, "a"), Arguments(1, "b")]
