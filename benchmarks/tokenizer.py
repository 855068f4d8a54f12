"""What the tokenizer service costs: per streamed token, for a long prompt, and at start.

    python -m benchmarks.tokenizer --json tokenizer.json

The service is a real process; this process plays the scheduler and the API. CPU time is the service's own.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil

from benchmarks.report import Result, report
from common.columns import pack_i32, pack_u64
from common.protocol import (
    Admit,
    Heartbeat,
    Hello,
    Load,
    Member,
    Members,
    ModelFacts,
    Peer,
    PromptKind,
    Sampling,
    Submit,
    TextBatch,
    ToApi,
    TokenBatch,
    Tokenize,
    Tokenized,
    ToScheduler,
    make_seq_id,
)
from common.transport import Inbox, LinkCounters, Push

MODEL = ModelFacts("m", "llama", 49152, 1_000_000, (2,), 16, 1000)
TEXT = "The four services exchange one message per step: def f(x): return x + 1  # größer, 日本語, 😀.\n"
SALT = 0x1234


class Rig:
    """A tokenizer process with this process around it."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="vl")
        run_dir = self.folder.name
        self.scheduler: Inbox[Any] = Inbox(f"ipc://{run_dir}/scheduler", ToScheduler, 20_000, LinkCounters())
        self.api: Inbox[Any] = Inbox(f"ipc://{run_dir}/api", ToApi, 20_000, LinkCounters())
        start_s = time.perf_counter()
        command = [sys.executable, "-m", "services.tokenizer", "--set", f"links.run_dir={run_dir}"]
        self.process = subprocess.Popen(command)
        peer = self.until(self.scheduler, Hello)[0].peer
        self.link = Push(peer.endpoint, 77, 20_000, LinkCounters())
        self.api_link = Push(peer.endpoint, SALT, 20_000, LinkCounters())
        members = [Member(peer, "ready"), Member(Peer("api", 0, SALT, self.api.endpoint), "ready")]
        self.link.send(Members(members, [], Load(), MODEL))
        while self.until(self.scheduler, Heartbeat)[0].state != "ready":
            pass
        self.ready_s = time.perf_counter() - start_s

    def until(self, inbox: Inbox[Any], kind: type, count: int = 1) -> list[Any]:
        """The next `count` messages of one kind."""
        found: list[Any] = []
        while len(found) < count:
            if not inbox.wait(60):
                raise TimeoutError(f"no {kind.__name__} within a minute")
            found += [message for _, message in inbox.drain() if isinstance(message, kind)]
        return found

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.scheduler, self.api, self.link, self.api_link):
            end.close()
        self.folder.cleanup()

    def token_ids(self, text: str, call: int) -> list[int]:
        call_id = make_seq_id(0, 0, SALT, 1_000_000 + call)
        self.api_link.send(Tokenize(call_id, PromptKind.TEXT, text=text))
        return list(memoryview(self.until(self.api, Tokenized)[0].tokens).cast("i"))

    def open(self, first: int, streams: int, stop: tuple[str, ...]) -> list[int]:
        seq_ids = [make_seq_id(0, 0, SALT, first + place) for place in range(streams)]
        for seq_id in seq_ids:
            self.api_link.send(Submit(seq_id, PromptKind.TEXT, Sampling(0), text="hello", stop=stop))
        self.until(self.scheduler, Admit, streams)
        return seq_ids


def streaming(rig: Rig, first: int, streams: int, steps: int, stop: tuple[str, ...]) -> Result:
    """CPU microseconds per token when each step is answered before the next is sent: no merging helps."""
    seq_ids = rig.open(first, streams, stop)
    text = rig.token_ids(TEXT * 20, first)
    batches = [
        TokenBatch(
            pack_u64(seq_ids),
            pack_i32([step] * streams),
            pack_i32(text[(step + 7 * place) % len(text)] for place in range(streams)),
            [],
        )
        for step in range(steps)
    ]
    before_s = rig.cpu_s()
    for batch in batches:
        rig.link.send(batch)
        rig.until(rig.api, TextBatch)
    value = (rig.cpu_s() - before_s) / (streams * steps) * 1e6
    kind = "no stop strings" if not stop else f"{len(stop)} stop strings"
    conditions = f"{streams} streams, {steps} steps one at a time, {kind}, whole process with its links"
    return Result(f"detokenize_us_{streams}{'_stop' if stop else ''}", value, "us/token", conditions)


def long_prompt(rig: Rig, streams: int, tokens: int) -> list[Result]:
    """Encoding speed, and the longest wait of a step while a long prompt is encoded."""
    per_text = len(rig.token_ids(TEXT, 0))
    seq_ids = rig.open(500_000, streams, ())
    prompt = Submit(make_seq_id(0, 0, SALT, 600_000), PromptKind.TEXT, Sampling(0), text=TEXT * (tokens // per_text))
    waits_s: list[float] = []
    encoding = False
    start_s = time.perf_counter()
    admitted_s = 0.0
    for step in range(100_000):
        if step == 50:
            start_s, encoding = time.perf_counter(), True
            rig.api_link.send(prompt)
        sent_s = time.perf_counter()
        rig.link.send(TokenBatch(pack_u64(seq_ids), pack_i32([step] * streams), pack_i32([500] * streams), []))
        rig.until(rig.api, TextBatch)
        if encoding:
            waits_s.append(time.perf_counter() - sent_s)
            if any(isinstance(message, Admit) for _, message in rig.scheduler.drain()):
                admitted_s = time.perf_counter() - start_s
                break
    conditions = f"a prompt of {tokens} tokens in the pool beside {streams} streams"
    return [
        Result("encode_tokens_per_ms", tokens / admitted_s / 1000, "tokens/ms", conditions),
        Result("encode_longest_step_ms", max(waits_s) * 1000, "ms", conditions),
        Result("encode_median_step_ms", sorted(waits_s)[len(waits_s) // 2] * 1000, "ms", conditions),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    rig = Rig()
    try:
        results = [Result("tokenizer_ready_s", rig.ready_s, "s", "bundled model, from process start")]
        for first, stop in ((0, ()), (100_000, ("<END>", "###"))):
            results.append(streaming(rig, first, arguments.streams, arguments.steps, stop))
        results += long_prompt(rig, 16, 100_000)
    finally:
        rig.close()
    report(results, arguments.json)


if __name__ == "__main__":
    main()
