import json
import time

import pytest
from starlette.requests import Request

from common.config import Api
from common.errors import Reject, RejectReason
from common.protocol import Submit
from services.api import deadline
from services.api.deadline import HEADER, left_s
from services.api.hub import Hub
from services.api.hub import Request as OpenRequest
from tests.services.api.system import CHAT, COMPLETION, rows, running, scenario
from tests.services.api.test_app import error_of


def request(header: str | None = None, age_s: float = 0.0) -> Request:
    headers = [] if header is None else [(HEADER.encode(), header.encode())]
    state = {"arrived_s": time.monotonic() - age_s}
    return Request({"type": "http", "headers": headers, "state": state})


@pytest.mark.parametrize(
    ("field_ms", "header", "default_s", "max_s", "expected_s"),
    [
        (None, None, 0.0, 0.0, None),
        (5000, None, 0.0, 0.0, 5.0),
        (None, "6000", 0.0, 0.0, 6.0),
        (5000, "6000", 0.0, 0.0, 5.0),
        (7000, "6000", 0.0, 0.0, 6.0),
        (None, None, 30.0, 0.0, 30.0),
        (90_000, None, 30.0, 0.0, 90.0),
        (90_000, None, 30.0, 40.0, 40.0),
        (None, None, 50.0, 40.0, 40.0),
        (None, None, 0.0, 40.0, 40.0),
        (5000, None, 0.0, 40.0, 5.0),
    ],
)
def test_which_deadline_counts(
    field_ms: int | None, header: str | None, default_s: float, max_s: float, expected_s: float | None
) -> None:
    left = left_s(request(header), Api(deadline_s=default_s, max_deadline_s=max_s), field_ms)
    assert left == expected_s or (left is not None and expected_s is not None and expected_s - 1 < left <= expected_s)


def test_time_since_the_arrival_counts() -> None:
    left = left_s(request(age_s=10.0), Api(), 15_000)
    assert left is not None and left <= 5.0
    with pytest.raises(Reject) as error:
        left_s(request(age_s=10.0), Api(), 9_000)
    assert error.value.reason is RejectReason.DEADLINE


@pytest.mark.parametrize("header", ["", "0", "-1", "1.5", "soon", "9" * 11, "4294967296", "²"])
def test_a_header_that_is_no_number_is_refused(header: str) -> None:
    with pytest.raises(Reject) as error:
        left_s(request(header), Api())
    assert (error.value.reason, error.value.param) == (RejectReason.INVALID, HEADER)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["field", "header", "setting"])
def test_silent_work_is_aborted_and_answered_504(stream: bool, by: str) -> None:
    """The deadline leaves a busy machine time to send the request on."""

    async def main() -> None:
        async with running(*(["api.deadline_s=0.3"] if by == "setting" else [])) as (system, client):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = lambda submit: None
            fields = {"deadline_ms": 300} if by == "field" else {}
            headers = {HEADER: "300"} if by == "header" else {}
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {**COMPLETION, "n": 2})):
                response = await client.post(path, json={**body, **fields, "stream": stream}, headers=headers)
                assert response.status_code == 504 and response.headers["x-should-retry"] == "false"
                error = error_of(response)
                assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
            first, second = (submit.seq_id for submit in tokenizer.submits)
            await system.until(lambda: tokenizer.aborts == [first, second, second + 1])
            assert not system.gateway.hub.choices
            # A terminal that was under way changes nothing.
            tokenizer.answer(tokenizer.submits[0])
            tokenizer.on_submit = tokenizer.answer
            again = await client.post("/v1/completions", json={**COMPLETION, "deadline_ms": 60_000, "max_tokens": 3})
            assert again.status_code == 200
            assert sum(system.gateway.figures.at(0).finished.values()) == 4

    scenario(main)


def test_an_open_stream_ends_with_one_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[tuple[Hub, OpenRequest]] = []
    set_alarm = deadline.set_alarm
    monkeypatch.setattr(deadline, "set_alarm", lambda hub, request, wait_s: alarms.append((hub, request)))

    async def main() -> None:
        async with running() as (system, client):
            (tokenizer,) = system.tokenizers

            def begin(submit: Submit) -> None:
                for seq_id in (submit.seq_id, submit.seq_id + 1):
                    tokenizer.send(rows((seq_id, 0, 1, "one")))

            tokenizer.on_submit = begin
            body = {**CHAT, "stream": True, "n": 2, "deadline_ms": 1000}
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                set_alarm(*alarms[0], 0.0)  # the time is over once the stream has begun
                blocks = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
            assert "[DONE]" not in blocks
            failed = [json.loads(block) for block in blocks if "error" in json.loads(block)]
            assert len(failed) == 1 and failed[0]["error"]["code"] == "deadline_exceeded"
            assert failed[0]["choices"][0]["finish_reason"] == "error"
            first = tokenizer.submits[0].seq_id
            await system.until(lambda: tokenizer.aborts == [first, first + 1])

    scenario(main)


@pytest.mark.parametrize("stream", [False, True])
def test_the_timer_of_an_ended_request_is_dropped(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms = []
    real = deadline.set_alarm

    def kept(*arguments: object) -> object:
        alarms.append(real(*arguments))
        return alarms[-1]

    monkeypatch.setattr("services.api.deadline.set_alarm", kept)

    async def main() -> None:
        async with running() as (_, client):
            for ms in (60_000, None):
                body = {**COMPLETION, "stream": stream, "deadline_ms": ms}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert alarms[0].cancelled() and alarms[1] is None

    scenario(main)


@pytest.mark.parametrize("value", [0, -1, 1.5, "9", 2**31])
def test_the_field_is_checked(value: object) -> None:
    async def main() -> None:
        async with running() as (_, client):
            response = await client.post("/v1/completions", json={**COMPLETION, "deadline_ms": value})
            assert response.status_code == 400 and error_of(response)["param"] == "deadline_ms"
            response = await client.post("/tokenize", json={"prompt": "hi"}, headers={HEADER: str(value) + "x"})
            assert response.status_code == 400 and error_of(response)["param"] == HEADER

    scenario(main)


def test_a_tokenizer_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with running() as (system, client):
            (tokenizer,) = system.tokenizers
            held: list[object] = []
            with monkeypatch.context() as patch:
                patch.setattr(tokenizer, "send", held.append)
                response = await client.post("/tokenize", json={"prompt": "hi"}, headers={HEADER: "1000"})
                assert response.status_code == 504 and error_of(response)["code"] == "deadline_exceeded"
            await system.until(lambda: len(held) == 1)
            tokenizer.send(held[0])  # too late, and harmless
            await system.until(lambda: not system.gateway.hub.calls)
            response = await client.post("/tokenize", json={"prompt": "hi"}, headers={HEADER: "60000"})
            assert response.json()["count"] == 2

    scenario(main)
