"""Cost of the HTTP service alone: the real API process between a null tokenizer and a load generator.

    python -m benchmarks.http [--json OUT] [--streams 64,256] [--tokens 256] [--step-us 8000] [--concurrency 1,64]
    python -m benchmarks.http --streams "" --concurrency "" --instructions 200   # of a short chat: times are noisy

The null tokenizer sends one TextBatch per step with one token for every open stream, as a model would; with step 0 it
sends as fast as the link takes it, so that the API lags and joins tokens. Figures: processor time of the API process
per token and per event, events per second of one core, and the time to the first byte when all requests come at once.
Then so many clients ask one request after the other, whose first token the null tokenizer has at once: from connecting
to the first event is what the front end adds.
"""

import argparse
import asyncio
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import uvloop

from benchmarks.load import StreamResult, encode_request, run_stream, stream_all
from benchmarks.report import Result, report
from common import config as configuration
from common.columns import pack_i32
from common.config import Config
from common.protocol import (
    Abort,
    FinishReason,
    Hello,
    Load,
    Member,
    Members,
    ModelFacts,
    Peer,
    Submit,
    TextBatch,
    TextFinished,
    ToScheduler,
    ToTokenizer,
)
from common.transport import Inbox, LinkCounters, Push, new_incarnation, scheduler_endpoint
from valence.serve import free_port

FACTS = ModelFacts("null", "null", 50_000, 8192, (0,), 16, 4096)
BEAT_S = 0.2
READY_S = 180  # a tool may slow it down
TOTALS = re.compile(r"^totals: (\d+)", re.MULTILINE)  # of callgrind
TOKEN = " token"
ASKED_TOKENS = (8, 96)


class NullTokenizer:
    """Scheduler and tokenizer in one blocking loop: enough of both for one API process."""

    def __init__(self, config: Config, step_s: float, eager: bool) -> None:
        self.step_s, self.eager = step_s, eager  # eager: a first token does not wait for a step
        self.incarnation, self.counters = new_incarnation(), LinkCounters()
        self.beats: Inbox[Any] = Inbox(scheduler_endpoint(config), ToScheduler, 20_000, self.counters)
        self.inbox: Inbox[Any] = Inbox(f"ipc://{config.run_dir}/null", ToTokenizer, 20_000, self.counters)
        self.scheduler = Peer("scheduler", 0, new_incarnation(), self.beats.endpoint)
        self.api: Push | None = None
        self.to_api: Push | None = None  # of the scheduler
        self.peers: list[Peer] = []
        self.open: dict[int, list[int]] = {}  # seq_id: [tokens sent, tokens wanted]

    def run(self) -> None:
        next_beat_s = next_step_s = 0.0
        while True:
            now_s = time.monotonic()
            self.beats_in()
            self.submits_in()
            if now_s >= next_beat_s:
                self.tell()
                next_beat_s = now_s + BEAT_S
            if self.open and now_s >= next_step_s:
                self.step(self.open)
                next_step_s = max(next_step_s + self.step_s, now_s - self.step_s)
            elif self.open:
                time.sleep(min(self.step_s / 20, 0.0005))
            else:
                self.inbox.wait(0.01)

    def beats_in(self) -> None:
        for _, message in self.beats.drain():
            if isinstance(message, Hello):
                self.api = Push(message.peer.endpoint, self.incarnation, 200, self.counters)
                self.to_api = Push(message.peer.endpoint, self.scheduler.incarnation, 200, self.counters)
                self.peers = [self.scheduler, message.peer, Peer("tokenizer", 0, self.incarnation, self.inbox.endpoint)]
                self.tell()

    def submits_in(self) -> None:
        for _, message in self.inbox.drain():
            if isinstance(message, Submit):
                self.open[message.seq_id] = [0, message.sampling.max_tokens]
                if self.eager:
                    self.step({message.seq_id: self.open[message.seq_id]})
            elif isinstance(message, Abort):
                self.open.pop(message.seq_id, None)

    def tell(self) -> None:
        if self.to_api is not None:
            self.to_api.send(Members([Member(peer, "ready") for peer in self.peers], [], Load(), FACTS))

    def step(self, stepped: dict[int, list[int]]) -> None:
        """One token for each of these open sequences."""
        assert self.api is not None
        rows, ended = len(stepped), []
        seq_ids = array("Q", stepped).tobytes()
        first = pack_i32(state[0] for state in stepped.values())
        for seq_id, state in list(stepped.items()):
            state[0] += 1
            if state[0] == state[1]:
                ended.append(TextFinished(seq_id, FinishReason.LENGTH, 8, state[1]))
                del self.open[seq_id]
        batch = TextBatch(seq_ids, first, pack_i32([1] * rows), [TOKEN] * rows, ended)
        while not self.api.send(batch):
            time.sleep(0.0002)


def null_tokenizer(config: Config, step_s: float, eager: bool) -> None:
    NullTokenizer(config, step_s, eager).run()


def client(pipe: Connection, port: int, streams: int, tokens: int) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens}
    pipe.send(stream_all(port, "/v1/chat/completions", [body] * streams))


def asker(pipe: Connection, port: int, concurrency: int, requests: int) -> None:
    """So many clients, each with one request after the other; sends the times to the first events, in seconds.

    Lengths differ, so that requests come by themselves and not all at once; the first ones do, and do not count.
    """
    bodies = [
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens} for tokens in range(*ASKED_TOKENS)
    ]
    encoded, found = [encode_request("/v1/chat/completions", body) for body in bodies], list[float]()

    async def one(client: int) -> None:
        for number in range(1 + requests // concurrency):
            result = await run_stream("127.0.0.1", port, encoded[(7 * client + 5 * number) % len(encoded)])
            assert not result.error, result.error
            if number:
                found.append(result.first_s)

    async def everyone() -> None:
        await asyncio.gather(*(one(client) for client in range(concurrency)))

    uvloop.run(everyone())
    pipe.send(found)


def ask_shortly(port: int, requests: int) -> None:
    """Chats of one token, one after the other, each on a connection of its own."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    encoded = encode_request("/v1/chat/completions", body)

    async def everything() -> None:
        for _ in range(requests):
            result = await run_stream("127.0.0.1", port, encoded)
            assert not result.error, result.error

    uvloop.run(everything())


def instructions(requests: int) -> Result:
    """What the API's own thread executes for a short chat, counted by Valgrind."""
    with tempfile.TemporaryDirectory(prefix="va-") as folder:
        output = Path(folder) / "counted"
        tool = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes"]
        with served(0.0005, True, (*tool, f"--callgrind-out-file={output}")) as (port, api):
            ask_shortly(port, 50)
            subprocess.run(["vgdb", f"--pid={api.pid}", "instrumentation", "on"], check=True, capture_output=True)
            ask_shortly(port, requests)
            subprocess.run(["vgdb", f"--pid={api.pid}", "dump"], check=True, capture_output=True)
        found = TOTALS.search(output.with_name("counted.1-01").read_text())
    assert found is not None, "Valgrind has counted nothing"
    conditions = f"{requests} chats of one token, each on its own connection, one API process"
    return Result("http_instructions_per_request", round(int(found[1]) / requests), "", conditions)


@contextmanager
def served(step_s: float, eager: bool = False, under: Sequence[str] = ()) -> Iterator[tuple[int, psutil.Process]]:
    """The API process, ready, on a free port; `under` a tool."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="va-") as folder:
        port = free_port("127.0.0.1", 0)
        settings = [f"links.run_dir={folder}", f"api.port={port}", "log.level=warning", "links.dead_after_s=30"]
        null = configuration.load(None, settings), step_s, eager
        tokenizer = spawn.Process(target=null_tokenizer, args=null, daemon=True)
        tokenizer.start()
        options = [option for setting in settings for option in ("--set", setting)]
        api = subprocess.Popen([*under, sys.executable, "-m", "services.api", *options], cwd=Path(__file__).parents[1])
        try:
            await_ready(port)
            yield port, psutil.Process(api.pid)
        finally:
            api.terminate()
            api.wait(30)
            tokenizer.terminate()
            tokenizer.join()


def await_ready(port: int) -> None:
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.05)
    raise RuntimeError("the API did not get ready")


class Run(msgspec.Struct):
    cpu_s: float
    wall_s: float
    results: list[StreamResult]


def measure(port: int, api: psutil.Process, streams: int, tokens: int) -> Run:
    """One burst of `streams` requests of `tokens` tokens each."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    loader = spawn.Process(target=client, args=(sender, port, streams, tokens))
    before, start_s = api.cpu_times(), time.monotonic()
    loader.start()
    results = receiver.recv()
    wall_s, after = time.monotonic() - start_s, api.cpu_times()
    loader.join()
    return Run(after.user + after.system - before.user - before.system, wall_s, results)


def first_bytes(port: int, concurrency: int, requests: int) -> list[Result]:
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    loader = spawn.Process(target=asker, args=(sender, port, concurrency, requests))
    loader.start()
    first_ms = sorted(1000 * each for each in receiver.recv())
    loader.join()
    lengths = "{} to {}".format(*ASKED_TOKENS)
    conditions = f"{requests} requests of {lengths} tokens, {concurrency} at a time, chat, one API process"
    shares = (("p50", 0.5), ("p95", 0.95))
    return [
        Result(f"http_added_first_byte_ms_{name}_{concurrency}", round(quantile(first_ms, share), 3), "ms", conditions)
        for name, share in shares
    ]


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def figures(run: Run, streams: int, tokens: int, step_us: int) -> list[Result]:
    total, events = streams * tokens, sum(result.num_events for result in run.results)
    first_ms = sorted(1000 * result.first_s for result in run.results)
    assert all(result.output_tokens == tokens for result in run.results)
    stream_s = max(result.total_s for result in run.results)
    pace = f"step {step_us} us" if step_us else "as fast as the link takes it"
    conditions = f"{streams} streams x {tokens} tokens, {pace}, chat, one API process"
    name = f"{streams}_{'paced' if step_us else 'flood'}"
    values = [
        (f"http_cpu_us_per_token_{name}", 1e6 * run.cpu_s / total, "us"),
        (f"http_cpu_us_per_event_{name}", 1e6 * run.cpu_s / events, "us"),
        (f"http_events_per_core_s_{name}", events / run.cpu_s, "1/s"),
        (f"http_tokens_per_s_{name}", total / stream_s, "1/s"),
        (f"http_first_byte_ms_p50_{name}", statistics.median(first_ms), "ms"),
        (f"http_first_byte_ms_max_{name}", first_ms[-1], "ms"),
    ]
    return [Result(n, round(v, 3), u, conditions) for n, v, u in values]


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of the HTTP service alone")
    parser.add_argument("--json", default=None, help="file for the results")
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-us", type=int, default=8000)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case; the one with the least CPU counts")
    parser.add_argument("--concurrency", default="1,64", help="clients at a time, for the time to the first byte")
    parser.add_argument("--requests", type=int, default=1280, help="of these")
    parser.add_argument("--instructions", type=int, default=0, help="short chats to count them for; needs Valgrind")
    arguments = parser.parse_args()
    results = [instructions(arguments.instructions)] if arguments.instructions else list[Result]()
    with served(arguments.step_us / 1e6, eager=True) as (port, _):
        first_bytes(port, 16, 64)  # warm-up
        for concurrency in map(int, filter(None, arguments.concurrency.split(","))):
            results += first_bytes(port, concurrency, max(arguments.requests // (64 // min(concurrency, 64)), 40))
    for step_us in (arguments.step_us, 0) if arguments.streams else ():
        with served(step_us / 1e6) as (port, api):
            measure(port, api, 16, 16)  # warm-up
            for streams in map(int, arguments.streams.split(",")):
                runs = [measure(port, api, streams, arguments.tokens) for _ in range(arguments.repeat)]
                best = min(runs, key=lambda run: run.cpu_s)
                results += figures(best, streams, arguments.tokens, step_us)
    report(results, arguments.json)


if __name__ == "__main__":
    main()
