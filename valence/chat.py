"""`valence chat`: a streaming conversation in the terminal, over the HTTP API like any other client.

Owns the history of one conversation. Ctrl-C ends the answer that is being written and keeps what has come.
"""

import json
import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import httpx
from rich.console import Console

from valence.errors import CommandError

HELP = "/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer"


class ChatError(CommandError):
    """The server refused or failed; the text is the server's."""


class Piece(NamedTuple):
    """One event of the stream."""

    text: str = ""
    output_tokens: int = 0  # set in the last one
    reasoning: str = ""  # shown, but not remembered


class Conversation:
    """The history, and how to ask for the next answer."""

    def __init__(self, client: httpx.Client, model: str, options: dict[str, Any], system: str = "") -> None:
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)
        self._client = client
        self._body = {**options, "model": model, "stream": True, "stream_options": {"include_usage": True}}

    def reset(self) -> None:
        self.messages = list(self._opening)

    def ask(self, text: str) -> Generator[Piece, None, None]:
        """Streams the answer and remembers it, also when the reader stops early. Raises ChatError."""
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            for piece in self._stream():
                answer.append(piece.text)
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[Piece]:
        try:
            body = {**self._body, "messages": self.messages}
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ChatError(_message(response.text))
                for line in response.iter_lines():
                    if line.startswith("data:") and (piece := parse_event(line[5:].strip())):
                        yield piece
        except httpx.HTTPError as error:
            raise ChatError(f"the connection failed: {error}") from error


def parse_event(text: str) -> Piece | None:
    """One server-sent event of a chat completion; None for those without text or usage. Raises ChatError."""
    if text == "[DONE]":
        return None
    event = json.loads(text)
    if "error" in event:
        raise ChatError(_message(text))
    if usage := event.get("usage"):
        return Piece(output_tokens=usage["completion_tokens"])
    content, reasoning = (
        "".join(choice["delta"].get(name) or "" for choice in event["choices"])
        for name in ("content", "reasoning_content")
    )
    return Piece(content, reasoning=reasoning) if content or reasoning else None


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or "the server gave no reason"


def authorization(api_key: str) -> dict[str, str]:
    """The header that carries a key; none for an empty one. Raises ChatError if no header can carry it."""
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ChatError("the API key holds characters that no key has")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def served_model(client: httpx.Client) -> str:
    """The name of the first model. Raises ChatError if the server cannot be reached or has none."""
    try:
        response = client.get("/v1/models")
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ChatError(f"{_message(response.text)} (--api-key or VALENCE_API_KEY has the key)")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ChatError(f"cannot talk to {client.base_url}: {error}") from error
    except (ValueError, KeyError, IndexError) as error:
        raise ChatError(f"{client.base_url} serves no model (yet)") from error


def converse(console: Console, conversation: Conversation, model: str) -> None:
    """Until /quit or the end of the input."""
    console.print(f"[bold]{model}[/]  [dim]{HELP}[/]")
    while True:
        try:
            text = console.input("[bold green]>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/quit":
            return
        if text == "/reset":
            conversation.reset()
            console.print("[dim]forgotten[/]")
        elif text.startswith("/"):
            console.print(f"[dim]{HELP}[/]")
        elif text:
            answer(console, conversation, text)


def answer(console: Console, conversation: Conversation, text: str) -> None:
    """Prints one answer as it comes, then its speed."""
    start_s, first_s, tokens = time.monotonic(), 0.0, 0
    thinking = False
    stream = conversation.ask(text)
    try:
        for piece in stream:
            first_s = first_s or time.monotonic()
            tokens = piece.output_tokens or tokens
            if piece.reasoning:
                console.print(piece.reasoning, end="", style="dim", markup=False, highlight=False, soft_wrap=True)
            elif thinking and piece.text:
                console.print("\n")
            thinking = bool(piece.reasoning)
            console.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/]", end="")
    except ChatError as error:
        console.print(f"[red]{error}[/]", end="")
    finally:
        stream.close()
    console.print()
    if tokens and first_s:
        spent_s = time.monotonic() - first_s
        speed = f"{(tokens - 1) / spent_s:,.1f} tokens/s, " if tokens > 1 and spent_s > 0 else ""
        console.print(f"[dim]{tokens} tokens, {speed}first after {1000 * (first_s - start_s):,.0f} ms[/]")
