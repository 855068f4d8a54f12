"""Speculative decoding against none: the same requests, greedy, in one process, first without drafts and then with.

`python -m benchmarks.speculative --rows 1,4,16 --set speculative.method=ngram`. Two tasks: a text whose lines repeat
each other, and a prompt that asks for a story. The outputs must be equal.
"""

import argparse

import numpy as np

from benchmarks.offline import Offline
from benchmarks.workloads import Ask
from common.config import Config, load
from services.tokenizer.source import load as load_tokenizer

LINES = "".join(f"The boat number {number} goes out at noon and comes back at night.\n" for number in range(1, 9))
TASKS = {"repeating": LINES, "story": "Once upon a time, in a town by the sea, there was a girl who"}
OUTPUT = 96


def asks(config: Config, text: str, rows: int) -> list[Ask]:
    tokens = load_tokenizer(config.model).tokenizer.encode(text).ids
    # beginnings of different lengths, so that rows are not the same row
    return [Ask(np.array(tokens[row % 8 :], np.int32), OUTPUT) for row in range(rows)]


def measure(config: Config, rows: list[int], rounds: int) -> dict[tuple[str, int], tuple[float, list[list[int]], str]]:
    """By task and rows: tokens per second (best of the rounds), the outputs, what held."""
    offline = Offline(config)
    found = {}
    for task, text in TASKS.items():
        for count in rows:
            before, best, outputs = offline.core.metrics(), 0.0, []
            for _ in range(rounds):
                run = offline.run(asks(config, text, count))
                best, outputs = max(best, run.output_tokens / run.wall_s), run.outputs
            now = offline.core.metrics()
            drafts, tried, held = (now[name] - before[name] for name in ("drafts", "draft_tokens", "accepted_tokens"))
            places = [now[f"accepted_at_{place}"] - before[f"accepted_at_{place}"] for place in range(8)]
            note = "no drafts"
            if drafts:
                by_place = ", ".join(f"{place / drafts:.2f}" for place in places if place)
                length = 1 + held / drafts
                note = f"{held / tried:.2f} held, {length:.2f} tokens per row and step; by place {by_place}"
            found[task, count] = best, outputs, note
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.speculative", description=__doc__)
    parser.add_argument("--rows", default="1,4", help="numbers of requests at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    own = ["model.max_len=1024", "kv.blocks=2048"]
    method = [setting for setting in options.set if not setting.startswith("speculative.")]
    plain = measure(load(None, own + method), rows, options.rounds)
    drafted = measure(load(None, own + options.set), rows, options.rounds)
    for key, (per_s, outputs, note) in drafted.items():
        before_per_s, before, _ = plain[key]
        same = "equal outputs" if outputs == before else "UNEQUAL OUTPUTS"
        print(f"{key[0]}, {key[1]} rows: {before_per_s:.1f} -> {per_s:.1f} tokens/s; {note}; {same}")


if __name__ == "__main__":
    main()
