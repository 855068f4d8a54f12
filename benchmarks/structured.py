"""What structured output costs: grammars to be prepared, masks per token, and rows that stand beside it.

    python -m benchmarks.structured [--vocab 151936] [--steps 40] [--rows 32] [--skip-model | --skip-grammars]
                                    [--set worker.device=cuda ...]

The first table is of one thread: a vocabulary of the bundled model's size, or one widened to `--vocab` by pairs of its
tokens, and texts drawn at random among the allowed tokens. The second drives the engine with the bundled model, two
plans in flight: the time of a step with and without rows under a grammar beside rows that may say anything.
"""

import argparse
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from llguidance import LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from rich.console import Console
from rich.table import Table

from common.columns import pack_i32
from common.config import Model, load
from common.grammar import fault_of, make_matcher
from common.protocol import Grammar, RowStart, Sampling, StepPlan
from services.worker.engine import Pending
from services.worker.grammars import Words
from services.worker.model_engine import ModelEngine

EOS = 2
BLOCKS_OF_ROW = 16


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = closed({"a": schema})
    return schema


PERSON = closed(
    {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    }
)
TREE = closed({"value": {"type": "number"}, "below": {"type": "array", "items": {"$ref": "#"}}})
GRAMMARS = {
    "any object": Grammar("json_schema", '{"type": "object"}'),
    "person": Grammar("json_schema", json.dumps(PERSON)),
    "tree": Grammar("json_schema", json.dumps(TREE)),
    "500 properties": Grammar("json_schema", json.dumps(closed({f"p{i}": {"type": "string"} for i in range(500)}))),
    "nested 60 deep": Grammar("json_schema", json.dumps(nested(60))),
    "enum of 10,000": Grammar("json_schema", json.dumps({"enum": [f"value-{i}" for i in range(10_000)]})),
    "string of 10,000": Grammar("json_schema", '{"type": "string", "maxLength": 10000}'),
    "expression": Grammar("regex", r"[a-z]+@[a-z]+\.(com|org)"),
    "hostile expression": Grammar("regex", r"(.*a.{20}b.*)"),
    "1,000 choices": Grammar("choice", json.dumps([f"choice {i}" for i in range(1000)])),
}


def words_of(size: int) -> LLTokenizer:
    words = Words(Model(), 49152, (EOS,))
    pieces, source = list(words.tokens), random.Random(0)
    known, long = set(pieces), [piece for piece in pieces if len(piece) > 2]
    while len(pieces) < size:
        piece = source.choice(long) + source.choice(long)
        if piece not in known:
            known.add(piece)
            pieces.append(piece)
    words.tokens = pieces
    return LLTokenizer(words, n_vocab=len(pieces), eos_token=[EOS])


def measure_grammars(console: Console, size: int, tokens: int = 200) -> None:
    start_s = time.perf_counter()
    words = words_of(size)
    console.print(f"vocabulary of {words.vocab_size}: {time.perf_counter() - start_s:.2f} s")
    table = Table("grammar", "prepare, ms", "first mask, ms", "mask median, us", "p99, us", "feed, us", "tokens", "end")
    mask, source = allocate_token_bitmask(1, words.vocab_size), random.Random(1)
    for name, grammar in GRAMMARS.items():
        start_s = time.perf_counter()
        matcher = make_matcher(grammar, words)
        prepare_s = time.perf_counter() - start_s
        masks, feeds = list[float](), list[float]()
        while len(masks) < tokens and not matcher.is_stopped():
            start_s = time.perf_counter()
            fill_next_token_bitmask(matcher, mask)
            masks.append(time.perf_counter() - start_s)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(allowed[source.randrange(len(allowed))])
            start_s = time.perf_counter()
            matcher.consume_token(token)
            feeds.append(time.perf_counter() - start_s)
        ordered = sorted(masks)
        table.add_row(
            name,
            f"{prepare_s * 1e3:.1f}",
            f"{masks[0] * 1e3:.2f}",
            f"{statistics.median(ordered) * 1e6:.0f}",
            f"{ordered[int(0.99 * (len(ordered) - 1))] * 1e6:.0f}",
            f"{statistics.median(feeds) * 1e6:.0f}",
            str(len(masks)),
            fault_of(matcher)[:40] or str(matcher.stop_reason()),
        )
    console.print(table)


def seconds_of_steps(engine: ModelEngine, grammars: Sequence[Grammar | None], steps: int) -> list[float]:
    """Decode steps of a row for each, as the worker's loop runs them."""
    engine.reset()
    prompt = pack_i32([1, 2, 3, 4])
    added = [
        RowStart(slot, slot, prompt, 4, 0, pack_i32(range(slot * BLOCKS_OF_ROW, (slot + 1) * BLOCKS_OF_ROW)),
                 Sampling(200, seed=slot, ignore_eos=True, grammar=grammar))
        for slot, grammar in enumerate(grammars)
    ]  # fmt: skip
    rows, found, pending = len(added), list[float](), deque[Pending]()
    for number in range(steps):
        start_s = time.perf_counter()
        pending.append(
            engine.execute(
                StepPlan(
                    number,
                    added=added if number == 0 else [],
                    slots=pack_i32(range(rows)),
                    positions=pack_i32([0 if number == 0 else 3 + number] * rows),
                    counts=pack_i32([4 if number == 0 else 1] * rows),
                    samples=bytes([1]) * rows,
                )
            )
        )
        if len(pending) > 1:
            pending.popleft().tokens()
        pending[-1].settle()
        found.append(time.perf_counter() - start_s)
    pending.popleft().tokens()
    return found[4:]


def measure_rows(console: Console, steps: int, rows: int, more: Sequence[str]) -> None:
    settings = [
        f"scheduler.max_rows={rows}",
        f"kv.blocks={rows * BLOCKS_OF_ROW}",
        "model.max_len=256",
        "worker.threads=1",
        *more,
    ]
    engine = ModelEngine(load(None, settings), lambda stage: None)
    table = Table("rows under a grammar", "of", "step median, ms", "best, ms")
    run = partial(seconds_of_steps, engine, steps=steps)
    kinds = {count: [GRAMMARS["any object"]] * count + [None] * (rows - count) for count in (0, 1, rows)}
    taken: dict[int, list[float]] = {count: [] for count in kinds}
    for _ in range(3):  # by turns, since others use this machine too
        for count, grammars in kinds.items():
            taken[count] += run(grammars)
    for count, found in taken.items():
        table.add_row(str(count), str(rows), f"{statistics.median(found) * 1e3:.2f}", f"{min(found) * 1e3:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--skip-model", action="store_true")
    parser.add_argument("--skip-grammars", action="store_true")
    parser.add_argument("--set", dest="settings", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    console = Console(width=140)
    if not options.skip_grammars:
        measure_grammars(console, options.vocab)
    if not options.skip_model:
        measure_rows(console, options.steps, options.rows, options.settings)


if __name__ == "__main__":
    main()
