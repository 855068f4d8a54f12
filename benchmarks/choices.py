"""What formats cost in answers: multiple choice through the HTTP API, for each format of weights and of the KV cache.

The questions are tasks of BIG-bench (Apache 2.0), which PyPI has; none are kept here:

    pip download --no-deps --no-binary :all: bigbench==1.0.0     # 358 MB
    python -m benchmarks.choices bigbench-1.0.0.tar.gz [--each 40] [--only bfloat16 int4 ...] [--json FILE]
                                 [--set worker.device=cuda ...]

Each choice is scored as the continuation of its question, as lm-eval asks (`echo`, `logprobs`): the model's is the one
whose log-probability per byte is largest. Letters would not do: a model this small knows no question by its letters.
"""

import argparse
import asyncio
import json
import math
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.perplexity import VARIANTS, Variant
from benchmarks.system import System

TASKS = (  # short questions with a few choices each, in English
    "general_knowledge", "goal_step_wikihow/goal_inference", "goal_step_wikihow/step_inference", "hindu_knowledge",
    "human_organs_senses", "phrase_relatedness", "riddle_sense", "similarities_abstraction",
)  # fmt: skip
AT_ONCE = 8  # questions
CALM = ("links.dead_after_s=300", "scheduler.step_deadline_s=600", "scheduler.max_rows=64", "kv.blocks=2048")


class Question(NamedTuple):
    task: str
    context: str
    choices: tuple[str, ...]
    right: frozenset[int]


class Outcome(NamedTuple):
    """Of one variant: the place of the choice that it takes, question by question."""

    variant: str
    taken: list[int]


def read(path: Path, tasks: Sequence[str], each: int) -> list[Question]:
    """As many of every task, spread over it. Raises ValueError naming the tasks that the archive lacks."""
    found: dict[str, list[Question]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = member.name.partition("/benchmark_tasks/")[2].removesuffix("/task.json")
            content = archive.extractfile(member) if name in tasks and member.name.endswith("/task.json") else None
            if content is None:
                continue
            questions = [_question(name, example) for example in json.load(content)["examples"]]
            count = min(each, len(questions))
            found[name] = [questions[place * len(questions) // count] for place in range(count)]
    if missing := set(tasks) - found.keys():
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    return [question for task in tasks for question in found[task]]


def _question(task: str, example: dict[str, Any]) -> Question:
    scores = example["target_scores"]
    best = max(scores.values())
    right = frozenset(place for place, score in enumerate(scores.values()) if score == best)
    return Question(task, f"Question: {example['input'].strip()}\nAnswer:", tuple(scores), right)


async def choose(client: httpx.AsyncClient, question: Question) -> int:
    """The place of the choice with the largest log-probability per byte. Raises HTTPStatusError."""
    prompts = [f"{question.context} {choice}" for choice in question.choices]
    body = {"prompt": prompts, "echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 0}
    response = (await client.post("/v1/completions", json=body)).raise_for_status()
    scores = [-math.inf] * len(prompts)
    for told in response.json()["choices"]:
        own = told["logprobs"]
        places = zip(own["text_offset"], own["token_logprobs"], strict=True)
        sum_of_choice = sum(value for offset, value in places if offset >= len(question.context))
        scores[told["index"]] = sum_of_choice / len(question.choices[told["index"]].encode())
    return max(range(len(scores)), key=scores.__getitem__)


async def choose_all(
    client: httpx.AsyncClient, questions: Sequence[Question], done: Callable[[], None] = lambda: None
) -> list[int]:
    turns = asyncio.Semaphore(AT_ONCE)

    async def take(question: Question) -> int:
        async with turns:
            taken = await choose(client, question)
        done()
        return taken

    return list(await asyncio.gather(*map(take, questions)))


async def measure(url: str, questions: Sequence[Question], done: Callable[[], None]) -> list[int]:
    async with httpx.AsyncClient(base_url=url, timeout=3600) as client:
        return await choose_all(client, questions, done)


def settings_of(variant: Variant) -> tuple[str, ...]:
    """Formats as they are served: beside bfloat16."""
    dtype = "float32" if variant == VARIANTS[0] else "bfloat16"
    return (f"model.dtype={dtype}", f"worker.quantize={variant.quantize}", f"kv.dtype={variant.kv}")


def right(questions: Sequence[Question], taken: Sequence[int]) -> float:
    """The share of questions answered right."""
    return sum(place in each.right for each, place in zip(questions, taken, strict=True)) / len(questions)


def table_of(questions: Sequence[Question], outcomes: Sequence[Outcome]) -> Table:
    """The first outcome is what the others are held against."""
    tasks = list(dict.fromkeys(question.task for question in questions))
    table = Table("", f"right of {len(questions)}, %", "standard error", "as the first, %", *tasks)
    for variant, taken in outcomes:
        share = right(questions, taken)
        same = sum(a == b for a, b in zip(taken, outcomes[0].taken, strict=True)) / len(questions)
        shares = []
        for task in tasks:
            places = [place for place, question in enumerate(questions) if question.task == task]
            own = right([questions[place] for place in places], [taken[place] for place in places])
            shares.append(f"{own * 100:.0f} of {len(places)}")
        error = math.sqrt(share * (1 - share) / len(questions))
        table.add_row(variant, f"{share * 100:.1f}", f"{error * 100:.1f}", f"{same * 100:.1f}", *shares)
    chance = sum(len(each.right) / len(each.choices) for each in questions) / len(questions)
    table.add_row("chance", f"{chance * 100:.1f}", *[""] * (2 + len(tasks)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, help="BIG-bench's source archive")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--each", type=int, default=40, help="questions of a task, at most")
    parser.add_argument("--only", nargs="*", help="names of variants, besides the exact one")
    parser.add_argument("--json", type=Path, help="keeps what was taken, and measures only what is not there")
    parser.add_argument("--set", dest="settings", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    console = Console(width=200, highlight=False)
    questions = read(options.questions, options.tasks.split(","), options.each)
    variants = [each for each in VARIANTS if options.only is None or each.name in (VARIANTS[0].name, *options.only)]
    kept = options.json is not None and options.json.exists()
    known: dict[str, list[int]] = json.loads(options.json.read_text()) if kept else {}
    with Progress(console=console) as progress:
        bar = progress.add_task("", total=len(questions) * len(variants))
        for variant in variants:
            progress.update(bar, description=variant.name)
            if len(known.get(variant.name, ())) == len(questions):
                progress.advance(bar, len(questions))
                continue
            with System(*CALM, *settings_of(variant), *options.settings) as system:
                known[variant.name] = asyncio.run(measure(system.url, questions, lambda: progress.advance(bar)))
            console.print(f"{variant.name}: {right(questions, known[variant.name]) * 100:.1f} %")
            if options.json is not None:
                options.json.write_text(json.dumps(known))
    console.print(table_of(questions, [Outcome(each.name, known[each.name]) for each in variants]))


if __name__ == "__main__":
    main()
