"""Runs a service module and keeps a copy of what it sends: `python -m tests.fuzz.tap services.api ...`.

`python -m tests.fuzz.tap` alone records: it starts a system of such services, lets it serve every kind of request and
writes one file of frames, the seeds of the fuzzing of links.
"""

import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec

from common.transport import Push
from tests.fuzz.processes import SERVICES, Processes

FRAMES = Path(__file__).with_name("frames.json")
EACH = 3  # frames of one kind on one link
MOST_BYTES = 4000


def record_into(folder: Path) -> None:
    """From now on this process writes each frame that it sends, as a line: receiver, message's name, frame."""
    send = Push.send
    counts: Counter[tuple[str, str]] = Counter()

    def tapped(self: Push, message: msgspec.Struct) -> bool:
        receiver = self.endpoint.rpartition("/")[2].partition("-")[0]
        key = receiver, type(message).__name__
        frame = bytes(self._header) + msgspec.msgpack.encode(message)
        if receiver in SERVICES and counts[key] < EACH and len(frame) <= MOST_BYTES:
            counts[key] += 1
            with (folder / "frames.jsonl").open("a") as file:
                file.write(json.dumps([*key, frame.hex()]) + "\n")
        return send(self, message)

    Push.send = tapped  # type: ignore[method-assign]


def record() -> None:
    system = Processes(command=(sys.executable, "-m", "tests.fuzz.tap"))
    try:
        system.wait_ready()
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "n": 2}
        requests = [
            ("/v1/completions", {"prompt": "a b c", "max_tokens": 4, "logit_bias": {"5": 1}, "stop": ["zzz"]}),
            ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3, "seed": 4, "stop_token_ids": [9]}),
            ("/v1/chat/completions", chat | {"chat_template_kwargs": {"a": 1}, "cache_salt": "salt", "priority": 2}),
            ("/v1/chat/completions", chat | {"max_tokens": 100_000}),
            ("/tokenize", {"prompt": "some text"}),
            ("/detokenize", {"tokens": [5, 6, 7]}),
        ]
        for path, body in requests:
            httpx.post(system.url + path, json=body, timeout=60)
        with httpx.stream("POST", f"{system.url}/v1/chat/completions", json=chat | {"stream": True}, timeout=60):
            pass  # leaving makes an Abort
        system.wait_idle()
        lines = (system.run_dir / "frames.jsonl").read_text().splitlines()
        counts: Counter[tuple[str, str]] = Counter()
        kept = []
        for receiver, name, frame in map(json.loads, lines):
            counts[receiver, name] += 1
            if counts[receiver, name] <= EACH:
                kept.append([receiver, name, frame])
        FRAMES.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in sorted(kept)) + "\n]\n")
        print(*sorted(counts.items()), sep="\n")
    finally:
        system.end()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        record()
    else:
        module, sys.argv[1:] = sys.argv[1], sys.argv[2:]
        run_dir = next(option.partition("=")[2] for option in sys.argv if option.startswith("links.run_dir="))
        Path(run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        record_into(Path(run_dir))
        runpy.run_module(module, run_name="__main__", alter_sys=True)
