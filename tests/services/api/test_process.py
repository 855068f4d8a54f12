import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.errors import EXIT_CONFIG
from common.protocol import Member, Peer, Submit
from services.api.listener import listen
from tests.services.api.system import CHAT, COMPLETION, LIMIT_S, rows, running, scenario


def test_draining_refuses_new_work_and_lets_streams_finish() -> None:
    async def main() -> None:
        async with running() as (system, client):
            (tokenizer,) = system.tokenizers

            def one(submit: Submit) -> None:
                tokenizer.send(rows((submit.seq_id, 0, 1, "one")))

            tokenizer.on_submit = one
            body = {**CHAT, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                system.process.stopping.set()
                await system.until(lambda: system.gateway.draining)
                ready = await client.get("/health/ready")
                assert ready.status_code == 503 and ready.json()["status"] == "draining"
                assert (await client.get("/health/live")).status_code == 200
                refused = await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 3})
                assert refused.status_code == 503 and "retry-after" in refused.headers
                assert refused.headers["connection"] == "close"
                seq_id = tokenizer.submits[0].seq_id
                tokenizer.send(rows((seq_id, 1, 1, "two")))
                tokenizer.finish(seq_id, 2)
                blocks = [line.removeprefix("data: ") async for line in lines if line]
            assert blocks[-1] == "[DONE]" and json.loads(blocks[-2])["choices"][0]["finish_reason"] == "length"
            await system.until(lambda: system.goodbyes == 1)

    scenario(main)


def test_for_the_lag_it_is_not_ready_but_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load balancers need a while to notice; what they send meanwhile is served, also by newcomers' connections."""

    async def main() -> None:
        async with running("api.drain_lag_s=5") as (system, client):
            sibling = Member(Peer("api", 5, 55, ""), "ready")
            monkeypatch.setattr(system.gateway, "siblings", lambda: [sibling.peer])
            over = asyncio.Event()
            real_sleep = asyncio.sleep

            async def sleep(wait_s: float) -> None:
                await (over.wait() if wait_s == 5 else real_sleep(wait_s))

            monkeypatch.setattr("services.api.process.asyncio.sleep", sleep)
            system.process.stopping.set()
            await system.until(lambda: system.gateway.leaving)
            for path in ("/ready", "/health"):
                answer = await client.get(path)
                assert answer.status_code == 503 and answer.json()["status"] == "draining"
                assert answer.json()["missing"] == ["api"]
            assert (await client.get("/live")).status_code == 200
            own = system.process.incarnation
            await system.until(lambda: system.members[own].state == "draining")
            async with httpx.AsyncClient(base_url=system.url, timeout=LIMIT_S) as newcomer:
                served = await newcomer.post("/v1/completions", json={**COMPLETION, "max_tokens": 3})
            assert served.status_code == 200 and served.json()["choices"][0]["finish_reason"] == "length"
            over.set()
            await system.until(lambda: system.gateway.draining)
            await system.until(lambda: system.goodbyes == 1)
            async with httpx.AsyncClient(base_url=system.url, timeout=LIMIT_S) as late:
                with pytest.raises(httpx.ConnectError):
                    await late.get("/live")

    scenario(main)


def test_with_a_ready_sibling_the_port_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with running() as (system, client):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = lambda submit: tokenizer.send(rows((submit.seq_id, 0, 1, "one")))
            sibling = Member(Peer("api", 5, 55, ""), "ready")
            monkeypatch.setattr(system.gateway, "siblings", lambda: [sibling.peer])
            async with client.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
                lines = response.aiter_lines()
                await anext(lines)
                system.process.stopping.set()
                await system.until(lambda: system.gateway.draining)
                async with httpx.AsyncClient(base_url=system.url, timeout=LIMIT_S) as newcomer:
                    with pytest.raises(httpx.ConnectError):
                        await newcomer.get("/health/live")
                tokenizer.finish(tokenizer.submits[0].seq_id, 1)
                assert [line async for line in lines if line][-1] == "data: [DONE]"

    scenario(main)


def test_siblings_are_the_other_ready_apis() -> None:
    async def main() -> None:
        async with running() as (system, _):
            other = Member(Peer("api", 5, 55, f"ipc://{system.run_dir}/nobody"), "ready")
            system.members[55] = other
            await system.until(lambda: bool(system.gateway.siblings()))
            assert system.gateway.siblings() == [other.peer]
            del system.members[55]

    scenario(main)


def test_what_does_not_finish_in_time_ends_with_an_error() -> None:
    async def main() -> None:
        async with running("links.drain_s=0.05") as (system, client):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = lambda submit: tokenizer.send(rows((submit.seq_id, 0, 1, "one")))
            body = {**COMPLETION, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                system.process.stopping.set()
                blocks = [line.removeprefix("data: ") async for line in lines if line]
            assert json.loads(blocks[-1])["error"]["message"] == "the server is shutting down"
            await system.until(lambda: tokenizer.aborts == [tokenizer.submits[0].seq_id])

    scenario(main)


def test_before_the_system_is_ready_requests_are_told_to_come_back() -> None:
    async def main() -> None:
        async with running("api.retry_after_s=3", tokenizers=0) as (_, client):
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
                response = await client.post(path, json=body)
                assert response.status_code == 503 and response.headers["retry-after"] == "3"
                assert "no tokenizer is ready" in response.json()["error"]["message"]

    scenario(main)


def test_figures_go_out_with_the_heartbeat() -> None:
    async def main() -> None:
        async with running() as (system, client):
            await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 3})
            own = system.process.incarnation
            await system.until(lambda: system.members[own].counters.get("output_tokens") == 3)
            member = system.members[own]
            assert member.state == "ready" and member.progress > 0
            assert member.counters["requests"] == 1 and member.counters["open_requests"] == 0

    scenario(main)


@contextlib.contextmanager
def taken_port(run_dir: Path) -> Iterator[int]:
    listener = listen("127.0.0.1", 0, run_dir)
    yield listener.port
    listener.close()


def settings(run_dir: Path, port: int) -> list[str]:
    return ["--set", f"links.run_dir={run_dir}", "--set", f"api.port={port}"]


def test_a_taken_port_is_a_configuration_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    with taken_port(first) as port:
        command = [sys.executable, "-m", "services.api", *settings(second, port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == EXIT_CONFIG and f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_process_ends_cleanly_on_sigterm(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_dir = tmp_path_factory.mktemp("r")
    with taken_port(run_dir) as port:
        pass

    async def main() -> None:
        command = [sys.executable, "-m", "services.api", *settings(run_dir, port)]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            while b"listening at" not in await process.stderr.readline():
                pass
            async with httpx.AsyncClient(timeout=LIMIT_S) as client:
                answer = await client.get(f"http://127.0.0.1:{port}/health/ready")
                assert answer.status_code == 503 and answer.json()["missing"] == ["scheduler", "worker", "tokenizer"]
            process.terminate()
            rest = await process.stderr.read()
            assert await process.wait() == 0, rest
        assert b"Traceback" not in rest

    scenario(main)


def test_a_second_sigterm_ends_the_process_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_dir = tmp_path_factory.mktemp("r")
    with taken_port(run_dir) as port:
        pass
    command = [sys.executable, "-m", "services.api", *settings(run_dir, port), "--set", "api.drain_lag_s=600"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for words in ("listening at", "serving on for 600 s"):
        while words not in (line := process.stderr.readline()):
            assert line, "it ended"
        process.terminate()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
