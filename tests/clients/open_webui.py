"""What Open WebUI sends to an OpenAI connection, replayed by raw HTTP; needs no package; see tests/clients/checks.py.

The list of models at login, a streaming chat that asks for usage, and beside it its side requests for a title.
"""

import json
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.clients.checks import MODEL, run

HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none", "User-Agent": "aiohttp"}


def send(url: str, path: str, body: Any = None) -> tuple[str, str]:
    """Type and text of the reply."""
    content = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1{path}", content, HEADERS)) as response:
        return response.headers["Content-Type"], response.read().decode()


def chat_body(**fields: Any) -> dict[str, Any]:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    return {"model": MODEL, "messages": turns, "max_tokens": 4, "temperature": 0} | fields


def models(url: str) -> None:
    listed = json.loads(send(url, "/models")[1])
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == [MODEL]


def streaming_chat(url: str) -> str:
    kind, text = send(url, "/chat/completions", chat_body(stream=True, stream_options={"include_usage": True}))
    assert kind.startswith("text/event-stream"), kind
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def side_requests(url: str) -> None:
    """Title and tags, at the same time as the chat, and none of them streams."""
    asked = chat_body(stream=False, max_completion_tokens=4)
    del asked["max_tokens"]
    with ThreadPoolExecutor(3) as pool:
        chat = pool.submit(streaming_chat, url)
        others = [pool.submit(send, url, "/chat/completions", asked) for _ in range(2)]
        texts = {json.loads(other.result()[1])["choices"][0]["message"]["content"] for other in others}
        assert texts == {chat.result()}


def chat(url: str) -> None:
    assert streaming_chat(url)


def errors(url: str) -> None:
    """It shows `error.message`, or `detail`, of a JSON body."""
    refusal: Any = {}
    try:
        send(url, "/chat/completions", chat_body(model="another"))
    except urllib.error.HTTPError as error:
        refusal = json.loads(error.read())
    assert refusal["error"]["message"], refusal


if __name__ == "__main__":
    sys.exit(run("", models, chat, side_requests, errors))
