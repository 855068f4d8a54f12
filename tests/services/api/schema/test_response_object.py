import json

import msgspec

from services.api.schema.response_object import response_of
from services.api.schema.responses import BODY


def test_what_was_asked_for_is_said_again() -> None:
    given = {
        "input": "x",
        "instructions": "be brief",
        "temperature": 0,
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "text": {"verbosity": "medium"},
        "store": False,
    }
    body = msgspec.to_builtins(response_of(BODY.parse(json.dumps(given).encode()), "resp_1", 3, "tiny"))
    assert (body["id"], body["object"], body["created_at"], body["status"]) == ("resp_1", "response", 3, "in_progress")
    assert {name: body[name] for name in ("instructions", "temperature", "max_output_tokens", "metadata", "store")} == {
        name: given[name] for name in ("instructions", "temperature", "max_output_tokens", "metadata", "store")
    }
    assert body["tools"][0]["name"] == "f" and body["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
