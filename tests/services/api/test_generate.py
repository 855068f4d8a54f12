import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from common.columns import pack_i32, pack_u64, unpack_i32
from common.protocol import FinishReason, Load, Pause, PromptKind, Submit, TextFinished, TextFormat
from tests.common.dialects.reading import EXAMPLES, TIME, WEATHER
from tests.services.api.system import CHAT, COMPLETION, FakeTokenizer, System, rows, running, scenario

ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
STREAM = {"stream": True}


def payloads(text: str) -> list[Any]:
    blocks = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    return [block if block == "[DONE]" else json.loads(block) for block in blocks]


def said(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


async def first_line(response: httpx.Response) -> str:
    async for line in response.aiter_lines():
        if line:
            return line
    raise AssertionError("the stream ended")


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_whole_answers(path: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        async with running() as (_, client):
            answer = (await client.post(path, json={**body, "max_tokens": 2})).json()
            assert answer["model"] == "tiny" and answer["system_fingerprint"] is None
            assert answer["usage"] == {
                "prompt_tokens": 7,
                "completion_tokens": 2,
                "total_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 0},
            }
            (choice,) = answer["choices"]
            assert said(choice) == " t0 t1" and choice["finish_reason"] == "length" and choice["stop_reason"] is None

    scenario(main)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_streams(path: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        async with running() as (_, client):
            full = {**body, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
            response = await client.post(path, json=full)
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-accel-buffering"] == "no"
            *chunks, usage, done = payloads(response.text)
            assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["total_tokens"] == 9
            text = "".join(
                c["choices"][0].get("text", c["choices"][0].get("delta", {}).get("content", "")) or "" for c in chunks
            )
            assert text == " t0 t1"
            assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]
            assert len({(c["id"], c["created"], c["model"]) for c in [*chunks, usage]}) == 1

    scenario(main)


def test_several_prompts_and_choices_come_prompt_by_prompt() -> None:
    async def main() -> None:
        async with running() as (system, client):
            (tokenizer,) = system.tokenizers

            def by_prompt(submit: Submit) -> None:
                prompt = list(unpack_i32(submit.tokens))
                for i in reversed(range(submit.n)):
                    tokenizer.send(rows((submit.seq_id + i, 0, 1, f"{prompt}#{i}")))
                    tokenizer.finish(submit.seq_id + i, 1)

            tokenizer.on_submit = by_prompt
            body = {"model": "tiny", "prompt": [[1, 2], [3]], "n": 2}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert [(c["index"], c["text"]) for c in answer["choices"]] == [
                (0, "[1, 2]#0"),
                (1, "[1, 2]#1"),
                (2, "[3]#0"),
                (3, "[3]#1"),
            ]
            assert answer["usage"]["prompt_tokens"] == 14 and answer["usage"]["completion_tokens"] == 4
            chunks = payloads((await client.post("/v1/completions", json={**body, **STREAM})).text)[:-1]
            text = {c["choices"][0]["index"]: c["choices"][0]["text"] for c in chunks if c["choices"][0]["text"]}
            assert text == {0: "[1, 2]#0", 1: "[1, 2]#1", 2: "[3]#0", 3: "[3]#1"}

    scenario(main)


def test_what_is_asked_reaches_the_tokenizer() -> None:
    async def main() -> None:
        async with running() as (system, client):
            more = {"stop": ["a"], "seed": 5, "priority": 2, "include_stop_str_in_output": True, "temperature": 0}
            await client.post("/v1/chat/completions", json={**CHAT, **more, "chat_template_kwargs": {"x": 1}})
            (submit,) = system.tokenizers[0].submits
            assert submit.kind is PromptKind.CHAT and json.loads(submit.messages) == CHAT["messages"]
            assert submit.stop == ("a",) and submit.include_stop and submit.priority == 2
            assert submit.sampling.seed == 5 and submit.sampling.temperature == 0 and submit.sampling.max_tokens == 0
            assert json.loads(submit.template_kwargs) == {"x": 1}

    scenario(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_tokenizer_has_its_status_and_field(stream: bool) -> None:
    async def main() -> None:
        async with running() as (system, client):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = lambda submit: tokenizer.refuse(
                submit, "too_long", "maximum context length", "prompt"
            )
            response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert response.json()["error"]["param"] == "prompt"
            assert not system.gateway.hub.choices

    scenario(main)


def test_an_error_before_the_first_token_is_a_500() -> None:
    async def main() -> None:
        async with running() as (system, client):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = lambda submit: tokenizer.finish(submit.seq_id, 0, FinishReason.ERROR, message="broke")
            for stream in (False, True):
                response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
                assert response.status_code == 500 and response.json()["error"]["message"] == "broke"

    scenario(main)


def hold(tokenizer: FakeTokenizer) -> None:
    """Answers with one token and then nothing."""

    def one(submit: Submit) -> None:
        tokenizer.send(rows(*((submit.seq_id + i, 0, 1, "one") for i in range(submit.n))))

    tokenizer.on_submit = one


def test_a_tokenizer_that_goes_in_the_middle_is_a_pause() -> None:
    async def main() -> None:
        async with running() as (system, client):
            (tokenizer,) = system.tokenizers
            hold(tokenizer)
            async with client.stream("POST", "/v1/chat/completions", json={**CHAT, **STREAM}) as response:
                lines = response.aiter_lines()
                await anext(lines)
                system.remove(tokenizer)
                successor = system.tokenizer(1)

                def rest(submit: Submit) -> None:
                    successor.send(rows((submit.seq_id, submit.delivered_tokens, 1, " rest")))
                    successor.finish(submit.seq_id, submit.delivered_tokens + 1)

                successor.on_submit = rest
                blocks = [line.removeprefix("data: ") async for line in lines if line]
            (submit,) = successor.submits
            assert submit.origin == tokenizer.submits[0].seq_id and submit.messages == tokenizer.submits[0].messages
            assert blocks[-1] == "[DONE]" and " rest" in "".join(blocks)

    scenario(main)


def test_a_request_that_comes_while_the_tokenizer_restarts_waits() -> None:
    async def main() -> None:
        async with running() as (system, client):
            system.remove(system.tokenizers[0])
            await system.until(lambda: not system.gateway.tokenizers())
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            await system.until(lambda: bool(system.gateway.hub.choices))
            system.tokenizer()
            assert (await asking).json()["choices"][0]["message"]["content"] == " t0 t1 t2"

    scenario(main)


def test_a_tokenizer_that_does_not_come_back_is_an_error_event_without_done() -> None:
    async def main() -> None:
        async with running("links.recover_s=0.1") as (system, client):
            (tokenizer,) = system.tokenizers
            hold(tokenizer)
            async with client.stream("POST", "/v1/chat/completions", json={**CHAT, **STREAM}) as response:
                lines = response.aiter_lines()
                await anext(lines)
                system.remove(tokenizer)
                blocks = [line.removeprefix("data: ") async for line in lines if line]
            last = json.loads(blocks[-1])
            assert last["choices"][0]["finish_reason"] == "error" and "[DONE]" not in blocks
            assert last["error"]["code"] == "service_unavailable"

    scenario(main)


def test_a_tokenizer_that_does_not_come_back_is_a_503_for_a_whole_answer() -> None:
    async def main() -> None:
        async with running("links.recover_s=0.1") as (system, client):
            (tokenizer,) = system.tokenizers
            hold(tokenizer)
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            await system.until(lambda: bool(tokenizer.submits))
            system.remove(tokenizer)
            assert (await asking).status_code == 503

    scenario(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_every_unfinished_choice(stream: bool) -> None:
    async def main() -> None:
        async with running() as (system, client):
            (tokenizer,) = system.tokenizers
            hold(tokenizer)
            body = {**CHAT, "n": 3, "stream": stream}
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await system.until(lambda: bool(tokenizer.submits))
            first = tokenizer.submits[0].seq_id
            tokenizer.finish(first + 1, 1)
            await system.until(lambda: len(system.gateway.hub.choices) == 2)
            asking.cancel()
            await system.until(lambda: len(tokenizer.aborts) == 2)
            assert sorted(tokenizer.aborts) == [first, first + 2]
            assert not system.gateway.hub.choices and system.gateway.figures.at(0).finished["abort"] == 2

    scenario(main)


def test_more_than_the_room_is_429_before_a_stream_opens() -> None:
    async def main() -> None:
        async with running("api.max_open_requests=2", "api.retry_after_s=7") as (system, client):
            (tokenizer,) = system.tokenizers
            hold(tokenizer)
            async with client.stream("POST", "/v1/completions", json={**COMPLETION, **STREAM, "n": 2}) as response:
                await first_line(response)
                for stream in (False, True):
                    refused = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
                    assert refused.status_code == 429 and refused.headers["retry-after"] == "7"
                    assert refused.json()["error"]["type"] == "rate_limit_error"
                too_many = await client.post("/v1/completions", json={**COMPLETION, "n": 3})
                assert too_many.status_code == 400
            await system.until(lambda: not system.gateway.hub.choices)
            tokenizer.on_submit = tokenizer.answer
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

    scenario(main)


class SlowClient(NamedTuple):
    """A stream that nobody reads, with its first token; `tokenizer` answers when told to."""

    system: System
    client: httpx.AsyncClient  # of others
    tokenizer: FakeTokenizer
    socket: socket.socket
    seq_id: int

    async def flood(self, until: Callable[[], object]) -> int:
        """Sends large rows; returns how many tokens the stream has then."""
        index = 1
        while not until():
            self.tokenizer.send(rows((self.seq_id, index, 1, LARGE.decode())))
            index += 1
            await asyncio.sleep(0)
        return index

    async def read(self) -> bytes:
        """All until the end of the connection."""
        loop, pieces = asyncio.get_running_loop(), [b"?"]
        while pieces[-1]:
            pieces.append(await loop.sock_recv(self.socket, 2**20))
        return b"".join(pieces)


LARGE = b"x" * 50_000


@contextlib.asynccontextmanager
async def slow_client(setting: str) -> AsyncIterator[SlowClient]:
    async with running(setting) as (system, client):
        (tokenizer,) = system.tokenizers
        hold(tokenizer)
        content = json.dumps({**COMPLETION, **STREAM}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", system.listener.port)) as link:
            link.setblocking(False)
            link.send(head.encode() + content)
            await system.until(lambda: bool(tokenizer.submits))
            yield SlowClient(system, client, tokenizer, link, tokenizer.submits[0].seq_id)


def test_a_client_that_does_not_read_is_paused_and_goes_on_when_it_reads() -> None:
    async def main() -> None:
        async with slow_client("api.max_buffered_events=400") as slow:  # so many more may come before it is cut
            system, tokenizer = slow.system, slow.tokenizer
            index = await slow.flood(lambda: system.pauses)
            assert set(system.pauses) == {Pause(slow.seq_id, True)}
            reading = asyncio.create_task(slow.read())
            await system.until(lambda: system.pauses[-1] == Pause(slow.seq_id, False))
            tokenizer.finish(slow.seq_id, index)
            await system.until(lambda: not system.gateway.hub.choices)
            slow.socket.send(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            text = await reading
            assert text.count(LARGE) >= index - 1 and b"[DONE]" in text
            figures = system.gateway.figures
            assert figures.pauses >= 1 and figures.slow_clients == 0 and not tokenizer.aborts

    scenario(main)


async def is_given_up_alone(slow: SlowClient) -> None:
    assert slow.tokenizer.aborts == [slow.seq_id] and slow.system.gateway.figures.slow_clients == 1
    slow.tokenizer.on_submit = slow.tokenizer.answer
    assert (await slow.client.post("/v1/completions", json=COMPLETION)).status_code == 200


def test_a_client_that_stops_reading_for_long_is_given_up() -> None:
    async def main() -> None:
        async with slow_client("api.slow_client_s=0.2") as slow:
            for index in range(1, 300):  # far less than the buffer's 4096 events
                slow.tokenizer.send(rows((slow.seq_id, index, 1, LARGE.decode())))
            await slow.system.until(lambda: slow.tokenizer.aborts == [slow.seq_id])
            await is_given_up_alone(slow)

    scenario(main)


def test_a_client_that_does_not_read_is_cut_and_others_are_not() -> None:
    async def main() -> None:
        async with slow_client("api.max_buffered_events=50") as slow:
            assert await slow.flood(lambda: slow.tokenizer.aborts) < 1000
            await is_given_up_alone(slow)

    scenario(main)


def test_an_accepted_stream_opens_when_it_is_silent_for_long() -> None:
    async def main() -> None:
        async with running() as (system, client):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = lambda submit: None
            async with asyncio.TaskGroup() as tasks:
                asking = tasks.create_task(client.post("/v1/completions", json={**COMPLETION, **STREAM}))
                await system.until(lambda: bool(tokenizer.submits))
                seq_id = tokenizer.submits[0].seq_id
                tokenizer.send(msgspec.structs.replace(rows(), accepted=pack_u64([seq_id])))
                await system.until(lambda: system.gateway.hub.choices[seq_id].accepted)
                for minute in (1, 2):
                    system.gateway.sweep(time.monotonic() + 60 * minute)
                    await asyncio.sleep(0.01)
                tokenizer.finish(seq_id, 0, FinishReason.ERROR, message="over", code="overloaded")
            answer = asking.result()
            assert answer.status_code == 200 and answer.text.count(": keep-alive") >= 1
            assert payloads(answer.text.replace(": keep-alive\n\n", ""))[-1]["error"]["code"] == "overloaded"

    scenario(main)


@pytest.mark.parametrize(("wait_s", "told"), [(0.0, "2"), (7.2, "8"), (900.0, "30")])
def test_clients_are_told_when_the_queue_will_have_moved_on(wait_s: float, told: str) -> None:
    async def main() -> None:
        async with running("api.retry_after_s=2", "api.max_retry_after_s=30") as (system, client):
            (tokenizer,) = system.tokenizers
            system.load = Load(waiting=9, wait_s=wait_s)
            system.tell()
            await system.until(lambda: system.gateway.node.view.load.waiting == 9)
            tokenizer.on_submit = lambda submit: tokenizer.refuse(submit, "overloaded", "full")
            refused = await client.post("/v1/completions", json=COMPLETION)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, told)

    scenario(main)


def test_bodies_of_open_requests_are_bounded_in_bytes() -> None:
    async def main() -> None:
        async with running("api.max_held_bytes=50000") as (system, client):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = lambda submit: None
            large = {**COMPLETION, "prompt": "x" * 40_000}
            asking = asyncio.create_task(client.post("/v1/completions", json=large))
            await system.until(lambda: bool(tokenizer.submits))
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                refused = await client.post(path, json=large)
                assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
                assert refused.json()["error"]["code"] == "overloaded"
            tokenizer.on_submit = tokenizer.answer
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
            tokenizer.answer(tokenizer.submits[0])
            assert (await asking).status_code == 200
            assert (await client.post("/v1/completions", json=large)).status_code == 200
            await system.until(lambda: system.gateway.bodies.held == 0)

    scenario(main)


def test_two_tokenizers_share_the_work() -> None:
    async def main() -> None:
        async with running(tokenizers=2) as (system, client):
            for _ in range(4):
                assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
            assert [len(tokenizer.submits) for tokenizer in system.tokenizers] == [2, 2]

    scenario(main)


def answer_in_pieces(tokenizer: FakeTokenizer, chance: random.Random) -> Callable[[Submit], None]:
    """Answers from a script that the seed chooses, cut anew each time."""

    def answer(submit: Submit) -> None:
        script = random.Random(submit.sampling.seed)
        dialect = script.choice(sorted(EXAMPLES))
        told = TextFormat(submit.seq_id, dialect, "think", False, 7, pack_i32(range(7)))
        tokenizer.send(msgspec.structs.replace(rows(), formats=[told]))
        for seq_id in range(submit.seq_id, submit.seq_id + submit.n):
            text = script.choice(["", "<think>Hm.</think>"]) + EXAMPLES[dialect]
            text = text[: script.randint(0, len(text))]
            begin = 0
            while begin < len(text):
                end = min(len(text), begin + chance.randint(1, 30))
                ids = {seq_id: (begin, pack_i32(map(ord, text[begin:end])))} if submit.options.token_ids else {}
                batch = rows((seq_id, begin, end - begin, text[begin:end]))
                tokenizer.send(msgspec.structs.replace(batch, ids=ids))
                begin = end
            reason = script.choice([FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP_STRING])
            end_ = TextFinished(seq_id, reason, 7, len(text), 4, stop_string="x", reasoning_tokens=len(text) // 3)
            tokenizer.send(rows(finished=(end_,)))

    return answer


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The choices of a stream as a whole reply has them, but for ids of calls, which are drawn."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = found.setdefault(
                choice["index"], {"text": "", "reasoning": "", "calls": [], "ids": [], "end": None}
            )
            delta = choice.get("delta", {})
            whole["text"] += choice.get("text") or delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    whole["calls"].append([call["function"]["name"], ""])
                whole["calls"][call["index"]][1] += call["function"]["arguments"]
            whole["ids"] += choice.get("token_ids", [])
            if choice["finish_reason"]:
                assert whole["end"] is None
                whole["end"] = choice["finish_reason"], choice["stop_reason"]
    return found


def as_joined(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message", {})
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {
        "text": message.get("content") or choice.get("text") or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [[call["name"], call["arguments"]] for call in calls],
        "ids": choice.get("token_ids", []),
        "end": (choice["finish_reason"], choice["stop_reason"]),
    }


GOES_ON = [{"role": "user", "content": "Say."}, {"role": "assistant", "content": "I said: "}]


def random_request(chance: random.Random) -> tuple[str, dict[str, Any]]:
    path, body = chance.choice(ROUTES)
    options = {
        "n": chance.randint(1, 3),
        "return_token_ids": chance.random() < 0.5,
        "seed": chance.randint(0, 10_000),
    }
    if path.endswith("chat/completions"):
        options |= {"parallel_tool_calls": chance.random() < 0.7, "include_reasoning": chance.random() < 0.7}
        options |= {"tools": [WEATHER, TIME]} if chance.random() < 0.7 else {}
        options |= {"echo": True, "messages": GOES_ON} if chance.random() < 0.3 else {}
    else:
        options |= {"echo": chance.random() < 0.5}
    return path, {**body, **options}


def test_streams_say_what_whole_replies_say() -> None:
    """Field by field, for random requests; both are cut in other ways."""

    async def main() -> None:
        chance = random.Random(5)
        async with running() as (system, client):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = answer_in_pieces(tokenizer, chance)
            for _ in range(60):
                path, body = random_request(chance)
                usage = {"include_usage": True, "continuous_usage_stats": chance.random() < 0.5}
                whole = (await client.post(path, json=body)).json()
                response = await client.post(path, json={**body, "stream": True, "stream_options": usage})
                *chunks, last, done = payloads(response.text)
                assert done == "[DONE]" and last["usage"] == whole["usage"]
                assert joined(chunks) == {choice["index"]: as_joined(choice) for choice in whole["choices"]}, body
                if usage["continuous_usage_stats"]:
                    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
                    assert counts == sorted(counts)
                    roles = [c for c in chunks if c["choices"][0].get("delta", {}).get("role")]
                    assert not any(chunk["usage"]["completion_tokens"] for chunk in roles)

    scenario(main)


def test_a_chat_echoes_what_the_assistant_has_said() -> None:
    async def main() -> None:
        async with running() as (_, client):
            for messages, before in ((GOES_ON, "I said: "), (GOES_ON[:1], "")):
                asked = {"messages": messages, "echo": True, "max_tokens": 1}
                (choice,) = (await client.post("/v1/chat/completions", json=asked)).json()["choices"]
                assert choice["message"]["content"] == before + " t0"
            many = {"messages": [GOES_ON, GOES_ON[:1]], "echo": True, "max_tokens": 1}
            choices = (await client.post("/v1/chat/completions/batch", json=many)).json()["choices"]
            assert [choice["message"]["content"] for choice in choices] == ["I said:  t0", " t0"]

    scenario(main)


def test_each_prompt_is_echoed_before_its_choices() -> None:
    async def main() -> None:
        async with running() as (_, client):
            asked = {"model": "tiny", "prompt": ["ab", "cd"], "n": 2, "echo": True, "max_tokens": 1}
            choices = (await client.post("/v1/completions", json=asked)).json()["choices"]
            assert [choice["text"] for choice in choices] == ["ab t0", "ab t0", "cd t0", "cd t0"]
            ids = (await client.post("/v1/completions", json={**asked, "prompt": [97, 98], "n": 1})).json()
            assert ids["choices"][0]["text"] == "ab t0"

    scenario(main)
