"""Against an HTTP server in this process, which answers with chosen events."""

import io
import json
from collections.abc import Callable

import httpx
import pytest
from rich.console import Console

from valence.chat import ChatError, Conversation, Piece, answer, authorization, converse, parse_event, served_model


def event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def delta(text: str) -> str:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


PARIS = (
    delta("Par")
    + ": a comment\n\n"
    + delta("is")
    + event(choices=[], usage={"completion_tokens": 2})
    + "data: [DONE]\n\n"
)


class Server:
    """Answers every chat with `stream` and keeps the bodies it was sent."""

    def __init__(self, stream: str = PARIS, status: int = 200) -> None:
        self.bodies: list[dict] = []
        self.stream, self.status = stream, status

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "tiny"}]})
        self.bodies.append(json.loads(request.content))
        return httpx.Response(self.status, text=self.stream)


def client(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(base_url="http://test", transport=httpx.MockTransport(handler))


def test_the_history_grows_and_is_sent() -> None:
    server = Server()
    talk = Conversation(client(server), "tiny", {"max_tokens": 5}, system="Be brief.")
    assert list(talk.ask("Capital of France?")) == [Piece("Par"), Piece("is"), Piece(output_tokens=2)]
    list(talk.ask("Sure?"))
    opening = {"role": "system", "content": "Be brief."}
    assert server.bodies[1]["messages"] == [
        opening,
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "Sure?"},
    ]
    assert server.bodies[0]["stream"] is True
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    assert server.bodies[0]["max_tokens"] == 5
    talk.reset()
    assert talk.messages == [opening]


def test_a_stopped_answer_keeps_what_has_come() -> None:
    talk = Conversation(client(Server()), "tiny", {})
    stream = talk.ask("Capital of France?")
    assert next(stream) == Piece("Par")
    stream.close()
    assert talk.messages[-1] == {"role": "assistant", "content": "Par"}


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (Server('{"error": {"message": "too long", "type": "x"}}', 400), "too long"),
        (Server("", 502), "no reason"),
        (Server(delta("Par") + event(error={"message": "worker lost"})), "worker lost"),
    ],
)
def test_refusals_and_failures_are_told(server: Server, reason: str) -> None:
    talk = Conversation(client(server), "tiny", {})
    with pytest.raises(ChatError, match=reason):
        list(talk.ask("Hello"))


def test_a_question_without_an_answer_is_not_kept() -> None:
    talk = Conversation(client(Server("{}", 500)), "tiny", {})
    with pytest.raises(ChatError):
        list(talk.ask("Hello"))
    assert talk.messages == []


def test_no_connection() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ChatError, match="connection failed: refused"):
        list(Conversation(client(broken), "tiny", {}).ask("Hello"))
    with pytest.raises(ChatError, match="cannot talk to http://test"):
        served_model(client(broken))


def test_the_served_model() -> None:
    assert served_model(client(Server())) == "tiny"
    with pytest.raises(ChatError, match="serves no model"):
        served_model(client(lambda request: httpx.Response(200, json={"data": []})))


def test_events_without_text() -> None:
    assert parse_event("[DONE]") is None
    assert parse_event('{"choices": [{"delta": {"role": "assistant"}}]}') is None
    assert parse_event('{"choices": [{"delta": {}, "finish_reason": "stop"}]}') is None


def console(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    typed = iter(lines)

    def read(*_: object) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    return Console(file=out, width=100), out


def test_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    screen, out = console(["Capital of France?", "/reset", "/help", "", "Hello", "/quit", "never"], monkeypatch)
    converse(screen, Conversation(client(server), "tiny", {}), "tiny")
    text = out.getvalue()
    assert "Paris" in text
    assert "2 tokens" in text
    assert "forgotten" in text
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]


def test_the_end_of_the_input_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, _ = console([], monkeypatch)
    converse(screen, Conversation(client(Server()), "tiny", {}), "tiny")


def test_ctrl_c_stops_the_answer_only() -> None:
    talk = Conversation(client(Server()), "tiny", {})

    class Impatient(Console):
        def print(self, *objects: object, **options: object) -> None:
            super().print(*objects, **options)  # type: ignore[arg-type]
            if objects == ("Par",):
                raise KeyboardInterrupt

    out = io.StringIO()
    answer(Impatient(file=out, width=100), talk, "Capital of France?")
    assert "(stopped)" in out.getvalue()
    assert talk.messages[-1] == {"role": "assistant", "content": "Par"}


def test_an_error_is_printed_and_the_session_goes_on() -> None:
    out = io.StringIO()
    answer(
        Console(file=out, width=100), Conversation(client(Server('{"error": {"message": "busy"}}', 429)), "t", {}), "x"
    )
    assert "busy" in out.getvalue()


def test_a_server_that_asks_for_a_key_is_told_apart() -> None:
    def ask(request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") == "Bearer vl-1":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        return httpx.Response(401, json={"error": {"message": "an API key is needed"}})

    with pytest.raises(ChatError, match=r"an API key is needed \(--api-key or VALENCE_API_KEY"):
        served_model(client(ask))
    with_key = client(ask)
    with_key.headers.update(authorization("vl-1"))
    assert served_model(with_key) == "tiny"
    assert authorization("") == {}
    with pytest.raises(ChatError, match="characters"):
        authorization("vl 1\n")


def test_reasoning_is_shown_and_not_remembered() -> None:
    thought = event(choices=[{"index": 0, "delta": {"reasoning_content": "Hm."}}])
    talk = Conversation(client(Server(thought + PARIS)), "tiny", {})
    console = Console(file=io.StringIO(), width=80)
    answer(console, talk, "Capital of France?")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("Hm.\n\nParis")
    assert talk.messages[-1] == {"role": "assistant", "content": "Paris"}
