"""JSON schemas of the public test suite through a real system: does every finished answer match, and what does it cost?

    pip download --no-deps --no-binary :all: jsonschema   # its sdist brings JSON-Schema-Test-Suite along
    python -m benchmarks.schemas jsonschema-4.26.0.tar.gz [--drafts draft2020-12,draft7] [--max-tokens 160] [--first 60]
                                 [--answers FILE]   # keeps them, and asks only for what is not finished there
                                 [--tries 3]        # as often, with other seeds, of what the limit cut
                                 [--most 300] [--at-once 32] [--set worker.device=cuda ...]

Each schema is asked of the bundled model at temperature 1, `strict`. What is finished is held against another
implementation, formats included. Then the time to a first token: of a grammar that is new, of the same again, of none.
"""

import argparse
import asyncio
import json
import statistics
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema_rs
from llguidance import LLTokenizer
from rich.console import Console

from benchmarks.system import System
from common.errors import Reject
from common.grammar import check, make_matcher
from common.protocol import Grammar

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
ASKED = {"prompt": "A JSON value:", "temperature": 1.0}
ENDS = ('"', "}", "]", '"}', '"]', "}}")  # made likelier: else half of the answers of so small a model would not end
BIAS = 6.0
CUT = "length"  # the reason of what the limit cut
OTHER_SEEDS = 1_000_003  # from a case's seeds of one try to those of the next
# about contentMediaType and contentEncoding, which describe a string; to hold it to them is a validator's own choice
# (draft 7, section 8), and we do not
DESCRIPTIVE = "optional/content.json"
CALM = ("links.dead_after_s=120", "scheduler.step_deadline_s=600")  # a machine may have others to serve


class Case(NamedTuple):
    name: str
    schema: Any
    tests: list[dict[str, Any]]  # with `data`, and whether it is `valid`


class Said(NamedTuple):
    """`reason`: of its end, or why it was refused."""

    case: Case
    reason: str
    text: str

    @property
    def is_finished(self) -> bool:
        return self.reason == "stop"

    @property
    def is_right(self) -> bool:
        validator = jsonschema_rs.validator_for(self.case.schema, validate_formats=True)
        return bool(validator.is_valid(json.loads(self.text)))


def suite(path: Path, drafts: Sequence[str]) -> list[Case]:
    """Every schema of these drafts, once; each tells its draft."""
    found: dict[str, Case] = {}
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda each: each.name):
            folder, _, name = member.name.partition("/json/tests/")[2].partition("/")
            asked = folder in drafts and name.endswith(".json") and name != DESCRIPTIVE
            content = archive.extractfile(member) if asked else None
            for group in json.load(content) if content else ():
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": DRAFTS[folder], **schema}
                key = json.dumps(schema, sort_keys=True)
                same = found.setdefault(key, Case(f"{folder}/{name}: {group['description']}", schema, []))
                same.tests.extend(group["tests"])
    return list(found.values())


def hold_instances(console: Console, cases: Sequence[Case]) -> None:
    """The suite's own instances, against the languages of those schemas that can be used; no model."""
    counts, taken, words = Counter[tuple[bool, bool]](), Counter[str](), LLTokenizer("byte")
    for case in cases:
        grammar = Grammar("json_schema", json.dumps(case.schema), "schema")
        try:
            check(grammar)
        except Reject:
            continue
        for test in case.tests:
            matcher, text = make_matcher(grammar, words), list(json.dumps(test["data"], ensure_ascii=False).encode())
            matches = matcher.try_consume_tokens(text) == len(text) and bool(matcher.is_accepting())
            counts[test["valid"], matches] += 1
            if matches and not test["valid"]:
                taken[case.name] += 1
    console.print(f"right instances: {counts[True, True]} match, {counts[True, False]} do not")
    console.print(f"wrong instances: {counts[False, False]} do not match, {counts[False, True]} do:")
    for name, count in taken.items():
        console.print(f"  {count:4d} {name}")


def body(schema: Any, **more: Any) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema, "strict": True}
    return ASKED | {"response_format": {"type": "json_schema", "json_schema": named}} | more


class Answers:
    """Said by earlier runs and by this one, by the case's name and schema, in a file of JSON lines, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else ()
        self._said: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for key, reason, text in map(json.loads, lines):
            self._said[key].append((reason, text))

    def finished(self, case: Case) -> Said | None:
        """What ended by itself or was refused; after that nothing is asked."""
        reason, text = self._said[self._key(case)][-1] if self.tries(case) else (CUT, "")
        return None if reason == CUT else Said(case, reason, text)

    def tries(self, case: Case) -> int:
        return len(self._said[self._key(case)])

    def add(self, said: Said) -> Said:
        key = self._key(said.case)
        self._said[key].append((said.reason, said.text))
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([key, said.reason, said.text]) + "\n")
        return said

    def _key(self, case: Case) -> str:
        return json.dumps([case.name, case.schema], sort_keys=True)


def some(cases: Sequence[Case], most: int) -> list[Case]:
    """As many, spread over the whole suite."""
    return list(cases) if most >= len(cases) else [cases[place * len(cases) // most] for place in range(most)]


async def say_all(
    url: str, cases: Iterable[Case], max_tokens: int, answers: Answers | None = None, at_once: int = 32
) -> list[Said]:
    """Every case's answer, `at_once` at a time. Raises AssertionError for what is neither an answer nor a refusal."""
    turns, kept = asyncio.Semaphore(at_once), answers or Answers(None)

    async def say(client: httpx.AsyncClient, number: int, case: Case) -> Said:
        if (known := kept.finished(case)) is not None:
            return known
        async with turns:
            seed = number + OTHER_SEEDS * kept.tries(case)
            asked = body(case.schema, max_tokens=max_tokens, seed=seed, logit_bias=bias)
            response = await client.post(f"{url}/v1/completions", json=asked)
        if response.status_code == 400:
            return kept.add(Said(case, response.json()["error"]["message"].partition(": ")[2], ""))
        assert response.status_code == 200, (case, response.text)
        (choice,) = response.json()["choices"]
        return kept.add(Said(case, choice["finish_reason"], choice["text"]))

    async with httpx.AsyncClient(timeout=3600, limits=httpx.Limits(max_connections=at_once)) as client:
        tokens = [(await client.post(f"{url}/tokenize", json={"prompt": end})).json()["tokens"] for end in ENDS]
        bias = {str(ids[0]): BIAS for ids in tokens if len(ids) == 1}
        return list(await asyncio.gather(*(say(client, number, case) for number, case in enumerate(cases))))


def first_token_s(client: httpx.Client, url: str, asked: dict[str, Any]) -> float:
    start_s = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=asked | {"stream": True, "max_tokens": 2}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                return time.perf_counter() - start_s
    raise AssertionError(f"no token came: {response.status_code}")


def first_tokens(url: str, schemas: Sequence[Any]) -> dict[str, list[float]]:
    """Seconds by kind. One request at a time; the prompt is in the prefix cache."""
    found: dict[str, list[float]] = {"without a grammar": [], "cold grammar": [], "warm grammar": []}
    with httpx.Client(timeout=60) as client:
        for _ in range(3):
            first_token_s(client, url, ASKED)
        for schema in schemas:
            found["without a grammar"].append(first_token_s(client, url, ASKED))
            for kind in ("cold grammar", "warm grammar"):
                found[kind].append(first_token_s(client, url, body(schema)))
    return found


def report(console: Console, said: Sequence[Said]) -> list[Said]:
    """Returns the wrong ones."""
    refused = Counter(each.reason.split("[")[0][:70] for each in said if not each.text and each.reason != CUT)
    finished = [each for each in said if each.is_finished]
    wrong = [each for each in finished if not each.is_right]
    cut = sum(each.reason == CUT for each in said)
    console.print(
        f"{len(said)} schemas: {sum(refused.values())} refused, {cut} cut at the limit, "
        f"{len(finished)} finished, of which {len(wrong)} do not match"
    )
    for reason, count in refused.most_common(12):
        console.print(f"  {count:4d} {reason}")
    for each in wrong:
        console.print(f"wrong: {each.case.name}: {json.dumps(each.case.schema)[:300]} {each.text!r:.200}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--drafts", default=",".join(DRAFTS))
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--first", type=int, default=60)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--tries", type=int, default=1, help="of a schema whose answer the limit cut, with other seeds")
    parser.add_argument("--most", type=int, default=1 << 20, help="schemas, of all drafts together")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--set", dest="settings", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    console, cases = Console(width=140, highlight=False), suite(options.suite, options.drafts.split(","))
    hold_instances(console, cases)
    own = f"scheduler.max_rows={options.at_once}", f"kv.blocks={max(64 * options.at_once, 2048)}"
    with System(*own, *CALM, *options.settings) as system:
        answers, asked = Answers(options.answers), some(cases, options.most)
        for _ in range(options.tries):
            start_s = time.perf_counter()
            said = asyncio.run(say_all(system.url, asked, options.max_tokens, answers, options.at_once))
            cut = sum(each.reason == CUT for each in said)
            console.print(f"asked in {time.perf_counter() - start_s:.0f} s; {cut} cut at the limit", style="dim")
            if not cut:
                break
    wrong = report(console, said)
    usable = [each.case.schema for each in said if each.text]
    with System(*options.settings) as system:  # which has not seen them
        taken = first_tokens(system.url, usable[:: max(len(usable) // options.first, 1)][: options.first])
    for kind, seconds in taken.items():
        ordered = sorted(seconds)
        console.print(
            f"first token, {kind}: median {statistics.median(ordered) * 1e3:.1f} ms, "
            f"95th percentile {ordered[int(0.95 * (len(ordered) - 1))] * 1e3:.1f} ms, {len(ordered)} requests"
        )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
