"""The stream of a generation from token ids to token ids: events have ids and no text. One per request, driven by the
hub as all streams are (sse.py).
"""

import asyncio

import msgspec

from services.api import errors
from services.api.hub import Hub, Request
from services.api.schema.logprobs import content_of
from services.api.schema.replies import stop_reason, usage_of
from services.api.schema.tokens import GeneratedChoice, GeneratedPart
from services.api.server import Wire
from services.api.sse import DONE, Stream


class TokenStream(Stream):
    def __init__(
        self,
        request: Request,
        hub: Hub,
        wire: Wire,
        include_usage: bool,
        alarm: asyncio.TimerHandle | None = None,
        slow_s: float = 30.0,
    ) -> None:
        super().__init__(request, hub, wire, alarm, slow_s)
        self._include_usage = include_usage

    def _opening(self) -> bytes:
        return b""

    def _drain(self) -> bytes:
        events: list[bytes] = []
        for choice in self._request.updated:
            choice.take()  # text that nobody wants
            ids = choice.answer.take_ids() if choice.answer is not None else []
            if choice.finished is not None and self._request.failure is None:
                told = choice.word, stop_reason(choice.finished), content_of(choice)
                events.append(self._event([GeneratedChoice(choice.index, ids, *told)]))
            elif ids:
                events.append(self._event([GeneratedChoice(choice.index, ids, logprobs=content_of(choice))]))
        self._request.updated.clear()
        return b"".join(events)

    async def _last(self) -> bytes:
        if self._request.failure is not None:
            return b"data: %b\n\n" % errors.encode(errors.of_reject(self._request.failure)[1])
        return (self._event([], True) if self._include_usage else b"") + DONE

    def _event(self, choices: list[GeneratedChoice], usage: bool = False) -> bytes:
        part = GeneratedPart(self._request.form.name, choices, usage_of(self._request) if usage else None)
        return b"data: %b\n\n" % msgspec.json.encode(part)
