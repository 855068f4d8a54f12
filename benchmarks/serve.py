"""Load over HTTP on the whole system, from client processes that are never the limit.

Starts the services as `valence serve` does, or loads a running server (`--url`, any OpenAI-compatible one). Closed loop
(`--concurrency`), open loop (`--rate`, Poisson arrivals), or one long prompt that arrives while others decode
(`--workload long-prompt`). No figure without its gate: every request ends with the exact number of tokens, and a
greedy prompt alone gives the same text twice.

    python -m benchmarks.serve --model 0.6b --concurrency 1,64,256 --json OUT
    python -m benchmarks.serve --model 8b --rate 4,8,16 --workload chat --ttft-ms 500 --tpot-ms 30
    python -m benchmarks.serve --model 0.6b --workload long-prompt --long 100000 --set model.max_len=131072
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import models, plots
from benchmarks.latency import Bounds, Summary, flat, summarize
from benchmarks.load import StreamResult, encode_request
from benchmarks.long_prompt import LongPrompt, Shock, TooShort, compare, run_long_prompt
from benchmarks.peers import PEERS
from benchmarks.published import PUBLISHED
from benchmarks.report import GateRed, Result, save
from benchmarks.serve_client import Clients, default_clients
from benchmarks.system import System, cpu_seconds
from benchmarks.workloads import Ask, Mix, Source, body
from common import config as configuration
from common import env
from valence.chat import authorization

PATH = "/v1/completions"
GATE_OUTPUT = 64
OUTPUT, LONG_RUN = 256, 4000
OPEN_ROWS = 512  # sequences at once in an open loop
CALL_S = 600.0
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


class Load(NamedTuple):
    """Closed loop of `concurrency` streams, or open loop of `rate` arrivals per second."""

    concurrency: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        return f"c{self.concurrency}" if self.concurrency else f"r{self.rate:g}"


@dataclass(frozen=True)
class Server:
    """What is loaded: its address, the name it serves under, and the highest token id + 1 that it knows."""

    host: str
    port: int
    model: str
    vocab: int
    system: System | None = None  # None: not ours
    is_null: bool = False  # it computes nothing, and its tokens depend on more than the prompt
    api_key: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def cpu_s(self) -> dict[str, float]:
        """Processor time of each service so far; empty if the server is not ours."""
        return cpu_seconds(self.system.processes()) if self.system else {}

    def request(self, ask: Ask) -> bytes:
        return encode_request(PATH, body(ask, self.model), self.api_key)

    def complete(self, ask: Ask) -> dict[str, Any]:
        """The whole answer at once. Raises GateRed if it is an error."""
        answer = httpx.post(
            self.url + PATH, json=body(ask, self.model), headers=authorization(self.api_key), timeout=CALL_S
        )
        if answer.status_code != httpx.codes.OK:
            raise GateRed(f"HTTP {answer.status_code}: {answer.text[:300]}")
        found: dict[str, Any] = answer.json()
        return found


@contextmanager
def serving(arguments: argparse.Namespace) -> Iterator[Server]:
    """The server to load: a running one, or one of our own for the time of the block."""
    vocab = arguments.vocab or (models.SHAPES[arguments.model].vocab if arguments.model in models.SHAPES else 30_000)
    if arguments.url:
        place = urlsplit(arguments.url)
        key = arguments.api_key or env.api_key()
        answer = httpx.get(f"{arguments.url}/v1/models", headers=authorization(key), timeout=CALL_S)
        if answer.is_error:
            raise GateRed(f"HTTP {answer.status_code}: {answer.text[:300]}")
        name = answer.json()["data"][0]["id"]
        yield Server(place.hostname or "127.0.0.1", place.port or 80, name, vocab, api_key=key)
        return
    source = models.find_model(arguments.model, arguments.max_position)
    rows = OPEN_ROWS if arguments.rate else max(map(int, arguments.concurrency.split(",")))
    if arguments.workload == "long-prompt":
        rows = arguments.streams + 1
    settings = [f"model.source={source}", f"scheduler.max_rows={rows}"]
    if arguments.model in models.SHAPES:
        settings += ["model.weights=random", f"model.max_len={arguments.max_len or arguments.max_position or 4096}"]
    if arguments.workload != "shared-prefix":
        settings.append("kv.prefix_cache=false")
    settings += arguments.set
    config = configuration.load(None, settings)
    with System(*settings, start_s=arguments.start_s) as system:
        console.print(f"ready after {system.ready_s:.1f} s")
        try:
            is_null = config.worker.kind == "null"
            yield Server("127.0.0.1", system.port, system.status()["model"], vocab, system, is_null)
        except (GateRed, RuntimeError):
            console.print(system.output()[-6000:], markup=False)
            raise


def gate(server: Server, source: Source) -> None:
    """Raises GateRed unless a greedy prompt alone gives the same text twice, at the exact length."""
    ask = Ask(source.ids(100), GATE_OUTPUT)
    answers = [server.complete(ask) for _ in range(2)]
    for answer in answers:
        if (count := answer["usage"]["completion_tokens"]) != GATE_OUTPUT:
            raise GateRed(f"{GATE_OUTPUT} tokens were asked for, {count} came")
    first, second = (answer["choices"][0]["text"] for answer in answers)
    if first != second and not server.is_null:
        raise GateRed(f"the same greedy prompt alone gave two texts:\n{first!r}\n{second!r}")


def check(results: list[StreamResult], asks: list[Ask]) -> None:
    """Raises GateRed unless all streams ended with the tokens they asked for."""
    if bad := [result.error for result in results if result.error]:
        raise GateRed(f"{len(bad)} of {len(asks)} requests failed; the first: {bad[0]}")
    wanted, given = sorted(ask.output_tokens for ask in asks), sorted(result.output_tokens for result in results)
    if wanted != given:
        raise GateRed(f"{sum(wanted)} tokens were asked for, {sum(given)} came")


def run_load(
    server: Server, clients: Clients, asks: list[Ask], load: Load, arrivals_s: list[float] | None
) -> list[StreamResult]:
    """Raises GateRed if a request did not end as it should."""
    requests = [server.request(ask) for ask in asks]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(load.name, total=len(asks))
        results = clients.run(
            requests, load.concurrency or len(asks), arrivals_s, lambda done: bar.update(task, completed=done)
        )
    check(results, asks)
    return results


def table_of(points: dict[str, Summary], model: str) -> Table:
    table = Table(title=f"{model}: over HTTP", show_lines=False)
    for name in ("load", "out tok/s", "vLLM", "total tok/s", "good"):
        table.add_column(name, justify="right")
    for name in ("TTFT", "TPOT", "ITL"):
        table.add_column(f"{name} p50/p90/p99 ms", justify="right", no_wrap=True)
    table.add_column("vLLM TTFT, ITL99", justify="right", style="dim")
    peers = PEERS[model].served if model in PEERS else {}
    for name, point in points.items():
        peer = peers.get(int(name[1:])) if name[1:].isdigit() and name.startswith("c") else None
        spreads = [point.ttft_ms, point.tpot_ms, point.itl_ms]
        table.add_row(
            name,
            f"{point.output_per_s:,.0f}",
            f"{peer.output_per_s:,.0f} ({point.output_per_s / peer.output_per_s:.2f}x)" if peer else "",
            f"{point.total_per_s:,.0f}",
            f"{point.goodput:.0%}",
            *(f"{s.p50:.1f}/{s.p90:.1f}/{s.p99:.1f}" for s in spreads),
            f"{peer.ttft_ms:g}, {peer.itl_ms:g}" if peer else "",
        )
    return table


def results_of(
    points: dict[str, Summary], shock: Shock | None, server: Server, arguments: argparse.Namespace
) -> list[Result]:
    model = "null" if server.is_null else arguments.model
    ready_s = server.system.ready_s if server.system else 0.0
    lengths = (
        f"{arguments.prompt}+{arguments.output or OUTPUT} tokens" if arguments.workload != "chat" else "chat lengths"
    )
    found = [Result(f"serve_{model}_ready_s", ready_s, "s", f"{model}, from the command")]
    for load, point in points.items():
        conditions = f"{model}, {arguments.workload}, {lengths}, {load}, {point.requests} requests, greedy"
        prefix = f"serve_{model}_{arguments.workload}_{load}"
        found += [Result(f"{prefix}_{name}", value, unit, conditions) for name, (value, unit) in flat(point).items()]
    if shock:
        conditions = f"{model}: {shock.streams} streams decode, then a prompt of {shock.prompt_tokens} tokens arrives"
        found += [
            Result(f"serve_{model}_long_prompt_{name}", value, unit, conditions)
            for name, (value, unit) in shock.flat().items()
        ]
    return found


def run_shock(server: Server, arguments: argparse.Namespace, clients: Clients, source: Source) -> Shock:
    """The long-prompt test; with longer streams again if they end too soon. Raises GateRed as the others do."""
    mix = Mix("random", arguments.prompt, arguments.output or LONG_RUN)
    warm = source.draw(mix._replace(output_tokens=16), arguments.streams)
    run_load(server, clients, warm, Load(arguments.streams), None)
    for lengthen in (1, 3, 9):
        longer = mix._replace(output_tokens=mix.output_tokens * lengthen)
        plan = LongPrompt(arguments.streams, longer, arguments.long, arguments.after_s)
        results, long = run_long_prompt(clients, source, plan, server.request)
        for result in (*results, long):
            if result.error:
                raise GateRed(result.error)
        try:
            return compare(results, long, plan)
        except TooShort as reason:
            console.print(f"{reason}; again with more")
        except ValueError as reason:
            raise GateRed(str(reason)) from reason
    raise GateRed("the streams always ended before the long prompt was through")


def run_all(server: Server, arguments: argparse.Namespace, clients: Clients) -> tuple[dict[str, Summary], Shock | None]:
    source = Source(server.vocab, arguments.seed)
    gate(server, source)
    if arguments.workload == "long-prompt":
        return {}, run_shock(server, arguments, clients, source)
    mix = Mix(arguments.workload, arguments.prompt, arguments.output or OUTPUT, arguments.prefix)
    bounds = Bounds(arguments.ttft_ms, arguments.tpot_ms)
    if arguments.rate:
        loads = [Load(rate=float(rate)) for rate in arguments.rate.split(",")]
    else:
        loads = [Load(concurrency=int(count)) for count in arguments.concurrency.split(",")]
    points: dict[str, Summary] = {}
    for load in loads:
        count = arguments.requests or (4 * load.concurrency if load.concurrency > 1 else 4 if not load.rate else 200)
        warm = source.draw(mix._replace(output_tokens=16), load.concurrency or 16)
        run_load(server, clients, warm, load if load.concurrency else Load(len(warm)), None)
        asks = source.draw(mix, count)
        arrivals_s = source.arrivals_s(load.rate, count) if load.rate else None
        before = server.cpu_s()
        points[load.name] = summarize(run_load(server, clients, asks, load, arrivals_s), bounds)
        duration_s = points[load.name].duration_s
        cores = {name: (after - before[name]) / duration_s for name, after in server.cpu_s().items()}
        if cores:
            used = ", ".join(f"{name} {value:.2f}" for name, value in cores.items())
            console.print(f"{load.name}: cores used: {used}", style="dim")
    return points, None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6b", help=f"{', '.join([*models.SHAPES, *PUBLISHED])}, or a model source")
    parser.add_argument("--url", default="", help="load this running server instead of starting one")
    parser.add_argument("--api-key", default="", help="key for --url; empty: VALENCE_API_KEY")
    parser.add_argument("--workload", default="random", choices=["random", "shared-prefix", "chat", "long-prompt"])
    parser.add_argument("--concurrency", default="1,64,256", help="closed loop: streams at a time")
    parser.add_argument("--rate", default="", help="open loop: arrivals per second")
    parser.add_argument("--requests", type=int, default=0, help="per load; 0: four for each stream")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument(
        "--output", type=int, default=0, help=f"tokens; 0: {OUTPUT}, or {LONG_RUN} beside a long prompt"
    )
    parser.add_argument("--prefix", type=int, default=256, help="shared-prefix: tokens that all prompts begin with")
    parser.add_argument("--streams", type=int, default=64, help="long-prompt: streams that decode")
    parser.add_argument("--long", type=int, default=100_000, help="long-prompt: its tokens")
    parser.add_argument("--after-s", type=float, default=1.5, help="long-prompt: when it comes")
    parser.add_argument("--ttft-ms", type=float, default=1000.0, help="bound for goodput")
    parser.add_argument("--tpot-ms", type=float, default=50.0, help="bound for goodput")
    parser.add_argument("--clients", type=int, default=0, help="client processes; 0: a quarter of the cores")
    parser.add_argument("--vocab", type=int, default=0, help="token ids are below this; 0: the model's")
    parser.add_argument(
        "--max-len", type=int, default=0, help="model.max_len of a started server; 0: 4096, or --max-position"
    )
    parser.add_argument("--max-position", type=int, default=0, help="positions of the model; 0: as the original")
    parser.add_argument("--start-s", type=float, default=300.0, help="how long a start may take")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="settings of the services")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--plot", help="write a picture to this .png file")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.workload == "long-prompt" and not arguments.max_position:
        arguments.max_position = models.LONG
    try:
        with (
            serving(arguments) as server,
            Clients(server.host, server.port, arguments.clients or default_clients()) as clients,
        ):
            points, shock = run_all(server, arguments, clients)
    except GateRed as reason:
        console.print(f"GATE RED, no figures: {reason}", markup=False)
        sys.exit(1)
    shape = models.SHAPES.get(arguments.model)
    name = "a worker that computes nothing" if server.is_null else shape.name if shape else arguments.model
    if points:
        console.print(table_of(points, name))
    if shock:
        console.print(shock.table(name))
    save(results_of(points, shock, server, arguments), arguments.json)
    if arguments.plot and points:
        plots.served(points, name, arguments.plot)


if __name__ == "__main__":
    main()
