"""A response of /v1/responses as it grows: its object, and the events that tell it in the order of OpenAI's API. Pure.

One per response; `typed_events` feeds it. Items are told one after another: one is open at most.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from common.dialects.events import Arguments, CallBegun, Content, Event, Reasoning
from common.errors import Reject
from services.api.errors import Problem, of_reject
from services.api.hub import Choice
from services.api.schema.logprobs import ChatLogprobs, ContentLogprob, Writing, writing
from services.api.schema.replies import Usage
from services.api.schema.response_object import (
    FunctionCallItem,
    IncompleteDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    usage_of,
)
from services.api.typed_events import Told

TEXT = {OutputMessage: ("output_text", OutputText), ReasoningItem: ("reasoning_text", ReasoningText)}
CODES: dict[str | None, Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]] = {
    "invalid_value": "invalid_prompt",
    "context_length_exceeded": "invalid_prompt",
    "overloaded": "rate_limit_exceeded",
}


class ResponseEvents:
    keep_alive = b": keep-alive\n\n"

    def __init__(self, response: ResponseObject, reports: Callable[[], ChatLogprobs | None] = lambda: None) -> None:
        """reports: log-probabilities of the tokens since the last call, if any are wanted."""
        self.body, self._reports = response, reports
        self._tokens: list[ContentLogprob] = []  # that no item has had
        self._number = 0  # of the next event
        self._open: OutputItem | None = None  # the newest item, while it grows
        self._pieces: list[str] = []  # of its text
        self._writing = Writing()  # what its tokens have written

    def begin(self, usage: Usage) -> Told:
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def feed(self, events: list[Event]) -> Told:
        told: Told = []
        for event in events:
            if isinstance(event, CallBegun):
                told += self._start(FunctionCallItem(new_name("fc"), event.identity, event.name))
            elif isinstance(event, Arguments):
                told.append(self._grow("response.function_call_arguments.delta", event.text))
            elif isinstance(event, Reasoning):
                told += self._text(ReasoningItem, "rs", event)
            else:
                told += self._text(OutputMessage, "msg", event)
        return told

    def end(self, choice: Choice, usage: Usage, failure: Reject | None) -> Told:
        cut = failure is not None or choice.word == "length"
        told = [] if self.body.output or failure else self._text(OutputMessage, "msg", Content(""))
        told += self._close("incomplete" if cut else "completed")
        response = self.body
        response.usage = usage_of(usage)
        if failure is not None:
            response.status, response.error = "failed", error_of(of_reject(failure)[1])
        elif cut:
            response.status, response.incomplete_details = "incomplete", IncompleteDetails("max_output_tokens")
        else:
            response.status, response.completed_at = "completed", int(time.time())
        return told

    def conclude(self) -> Told:
        return [self._whole(f"response.{self.body.status}")]

    def _text(self, kind: type[OutputMessage] | type[ReasoningItem], prefix: str, event: Content | Reasoning) -> Told:
        name, part = TEXT[kind]
        told: Told = []
        if not isinstance(self._open, kind):
            item = kind(new_name(prefix))
            told += self._start(item)
            item.content.append(part())
            told.append(self._part("response.content_part.added", item, part()))
        if event.text:
            extra = {"logprobs": self._more(event.text)} if kind is OutputMessage else {}
            told.append(self._grow(f"response.{name}.delta", event.text, content_index=0, **extra))
        return told

    def _more(self, text: str) -> list[Any]:
        """Log-probabilities of the tokens that write this."""
        self._tokens += news.content if (news := self._reports()) is not None else ()
        return list(map(msgspec.to_builtins, self._writing.more(self._tokens, text))) if self._tokens else []

    def _start(self, item: OutputItem) -> Told:
        told = self._close("completed")
        self._open, self._pieces, self._writing = item, [], Writing()
        self.body.output.append(item)
        told.append(self._item("response.output_item.added", item))
        return told

    def _grow(self, kind: str, text: str, **more: Any) -> dict[str, Any]:
        assert self._open is not None, "a call's arguments come while it is the newest item"
        self._pieces.append(text)
        return self._event(kind, item_id=self._open.id, output_index=self._index, **more, delta=text)

    def _close(self, status: Literal["completed", "incomplete"]) -> Told:
        item, text, told = self._open, "".join(self._pieces), []
        if item is None:
            return []
        place = {"item_id": item.id, "output_index": self._index}
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            told.append(self._event("response.function_call_arguments.done", **place, name=item.name, arguments=text))
        else:
            name, _ = TEXT[type(item)]
            item.content[0].text = text
            self._tokens += news.content if (news := self._reports()) is not None else ()
            own, self._tokens = writing(self._tokens, text) if text else ([], self._tokens)
            extra: dict[str, Any] = {}
            if isinstance(item, OutputMessage):
                item.content[0].logprobs = own
                extra = {"logprobs": msgspec.to_builtins(own)}
            told.append(self._event(f"response.{name}.done", **place, content_index=0, text=text, **extra))
            told.append(self._part("response.content_part.done", item, item.content[0]))
        item.status = status
        told.append(self._item("response.output_item.done", item))
        self._open = None
        return told

    @property
    def _index(self) -> int:
        return len(self.body.output) - 1

    def _part(self, kind: str, item: OutputItem, part: OutputText | ReasoningText) -> dict[str, Any]:
        return self._event(
            kind, item_id=item.id, output_index=self._index, content_index=0, part=msgspec.to_builtins(part)
        )

    def _item(self, kind: str, item: OutputItem) -> dict[str, Any]:
        return self._event(kind, output_index=self._index, item=msgspec.to_builtins(item))  # as it is now

    def _whole(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response=msgspec.to_builtins(self.body))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def new_name(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def error_of(problem: Problem) -> ResponseError:
    return ResponseError(CODES.get(problem.code, "server_error"), problem.message)
