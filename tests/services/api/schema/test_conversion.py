import pytest

from common.errors import Reject
from services.api.errors import invalid
from services.api.schema.conversion import Conversation, chat_of, renamed


def test_what_an_assistant_does_in_a_row_is_one_message() -> None:
    talk = Conversation()
    talk.say("user", "hi", "i0")
    talk.think("hm", "i1")
    talk.say("assistant", "yes", "i2")
    talk.call("c1", "f", "{}", "i3")
    talk.call("c2", "g", "{}", "i4")
    talk.result("c1", "1", "i5")
    talk.call("c3", "h", "{}", "i6")
    talk.say("assistant", "so", "i7")
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant", "assistant"]
    first = talk.messages[1]
    assert (first["reasoning_content"], first["content"], len(first["tool_calls"])) == ("hm", "yes", 2)
    assert talk.places["messages[1].tool_calls[1].function"] == "i4" and talk.places["messages[2]"] == "i5"
    chat_of({"messages": talk.messages, "temperature": None})


def test_a_refusal_names_what_the_client_sent() -> None:
    names = {"messages": "input", "messages[2].content": "input[0].content", "messages[2]": "input[0]"}
    for param, known in {
        "messages[2].content[1].type": "input[0].content[1].type",
        "messages[2].name": "input[0].name",
        "messages[21]": "input[21]",
        "messages": "input",
        "messages_other": "messages_other",
    }.items():
        with pytest.raises(Reject) as caught, renamed(names):
            raise invalid(f"{param} is wrong", param)
        assert (caught.value.param, caught.value.message) == (known, f"{known} is wrong")


def test_a_refusal_without_a_field_stays() -> None:
    with pytest.raises(Reject) as caught, renamed({"messages": "input"}):
        raise invalid("so")
    assert caught.value.message == "so"
