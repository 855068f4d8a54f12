"""The command line. Each command is a thin layer; what it needs is imported when it runs, so that --help is fast."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from common import env
from common.errors import EXIT_CONFIG, ConfigError
from valence.doctor_command import doctor
from valence.errors import CommandError
from valence.key_commands import keys
from valence.options import AsJson, ConfigFile, Settings, load_config, print_listing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.config import Config
    from valence.programs import Program
    from valence.replicas import Change

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve language models, and look after the server.",
)

RunDir = Annotated[str, typer.Option("--run-dir", help="Run directory of the server, if there are several.")]
Port = Annotated[int | None, typer.Option("--port", help="Port of the server, if there are several.")]
ServePort = Annotated[int | None, typer.Option("--port", help="Port of the API; 0: any free one.")]
Model = Annotated[str, typer.Option("--model", help="Folder, .gguf file, hub id, or bundled.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda (also for ROCm).")]
Quantize = Annotated[
    str, typer.Option("--quantize", help="Weights are converted at load: fp8, fp8_block, mxfp4, int8 or int4.")
]
ApiKey = Annotated[str, typer.Option("--api-key", help="Key for the server; empty: VALENCE_API_KEY.")]


def _load(config: str, model: str, port: int | None, device: str, settings: list[str] | None) -> "Config":
    named = {"model.source": model, "api.port": "" if port is None else str(port), "worker.device": device}
    own = [f"{key}={value if key == 'api.port' else json.dumps(value)}" for key, value in named.items() if value]
    return load_config(config, [*own, *(settings or [])])


@app.command()
def serve(
    model: Model = "",
    port: ServePort = None,
    device: Device = "",
    quantize: Quantize = "",
    config: ConfigFile = "",
    settings: Settings = None,
) -> None:
    """Run all services in the foreground; Ctrl-C ends them."""
    own = [f"worker.quantize={json.dumps(quantize)}"] if quantize else []
    tree = _load(config, model, port, device, own + (settings or []))
    from valence.serve import serve as run

    sys.exit(run(tree))


@app.command("config")
def show_config(
    model: Model = "", port: ServePort = None, device: Device = "", config: ConfigFile = "", settings: Settings = None
) -> None:
    """Print the resolved settings as TOML."""
    from common.config import render

    print(render(_load(config, model, port, device, settings)), end="")


@app.command()
def status(
    as_json: AsJson = False,
    live: Annotated[str, typer.Option("--live", help="Only whether this process lives, as the exit status.")] = "",
    run_dir: RunDir = "",
    port: Port = None,
    config: ConfigFile = "",
    settings: Settings = None,
) -> None:
    """Show processes, requests and KV use of the running server.

    --live worker-0 is for the health checks of containers: it finds the scheduler by the same settings as the services.
    """
    if live:
        own = [f"links.run_dir={json.dumps(run_dir)}"] if run_dir else []
        _probe(live, _load(config, "", port, "", own + (settings or [])))
        return
    from valence import rundir
    from valence.status import StatusClient, document
    from valence.supervisor import Supervisor

    try:
        path = rundir.find(run_dir, port)
        tree, views = rundir.running_config(path), Supervisor(path).processes()
    except rundir.NotRunning:
        own = [f"links.run_dir={json.dumps(run_dir)}"] if run_dir else []
        tree, views = _load(config, "", port, "", own + (settings or [])), []  # containers have no supervisor of ours
        if not tree.run_dir.is_dir():
            raise
    with StatusClient(tree) as client:
        answers = client.ask_each()
    if not (views or answers):
        _fail(f"no server is running in {tree.run_dir}")
    found = document(views, answers, tree.links, time.time())
    if as_json:
        print(json.dumps(found))
        return
    from rich.console import Console

    from valence.display import status_table

    Console().print(status_table(found, time.time()))


def _probe(name: str, tree: "Config") -> None:
    from valence.live import named, trouble
    from valence.status import StatusClient

    program = named(name)
    with StatusClient(tree) as client:
        why = trouble(program, client.ask(), tree.links)
    if why:
        _fail(f"{name}: {why}")
    print(f"{name} lives")


@app.command()
def health(
    name: Annotated[str, typer.Argument(help="Process, like worker-0; empty: those of this container.")] = "",
    end_hung: Annotated[bool, typer.Option("--end-hung", help="Kill those that have hung for half a minute.")] = False,
    run_dir: RunDir = "",
    config: ConfigFile = "",
    settings: Settings = None,
) -> None:
    """Say whether a process is ready, also by the exit status: for the health checks of containers."""
    own = [f"links.run_dir={json.dumps(run_dir)}"] if run_dir else []
    tree = _load(config, "", None, "", own + (settings or []))
    from valence.health import end_if_hung, holders_here, unready
    from valence.live import named
    from valence.programs import Program
    from valence.status import StatusClient

    holders = [] if name else holders_here(tree)
    with StatusClient(tree) as client:
        if name:
            _report(name, unready(named(name), tree, client))
        for holder in holders:
            program = Program(holder.service, holder.number)
            killed = end_if_hung(holder, tree, client) if end_hung else ""
            _report(program.name, killed or unready(program, tree, client))


def _report(name: str, why: str) -> None:
    if why:
        _fail(f"{name}: {why}")
    print(f"{name} is ready")


@app.command()
def restart(
    service: Annotated[str, typer.Argument(help="api, tokenizer, scheduler, worker or all.")],
    instance: Annotated[int | None, typer.Option("--instance", help="Only this replica.")] = None,
    run_dir: RunDir = "",
    port: Port = None,
) -> None:
    """Replace processes one after the other while the server runs."""
    _change(run_dir, port, lambda change: change.restart(service, instance), "ready")


@app.command()
def scale(
    service: Annotated[str, typer.Argument(help="api, tokenizer or scheduler.")],
    count: Annotated[int, typer.Argument(help="Number of replicas.")],
    run_dir: RunDir = "",
    port: Port = None,
) -> None:
    """Change the number of replicas while the server runs."""
    _change(run_dir, port, lambda change: change.scale(service, count), "done")


def _change(run_dir: str, port: int | None, make: "Callable[[Change], Iterator[Program]]", done: str) -> None:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from valence import rundir
    from valence.replicas import Change
    from valence.status import StatusClient

    path = rundir.find(run_dir, port)
    config = rundir.running_config(path)
    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        StatusClient(config) as client,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("")
        change = Change(config, client, lambda name, what: bar.update(task, description=f"{name} {what}"))
        start_s = time.monotonic()
        for program in make(change):
            console.print(f"{program.name} {done} after {time.monotonic() - start_s:.1f} s", highlight=False)
            start_s = time.monotonic()


@app.command()
def stop(run_dir: RunDir = "", port: Port = None) -> None:
    """End the running server."""
    from valence import rundir
    from valence.replicas import stop as end

    path = rundir.find(run_dir, port)
    end(path)
    print(f"stopped {path}")


@app.command()
def logs(
    service: Annotated[str, typer.Argument(help="Only this service or process, like api or api-1.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", help="Last lines of each file.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines.")] = False,
    run_dir: RunDir = "",
    port: Port = None,
) -> None:
    """Print the services' logs."""
    from valence import rundir
    from valence.logs import Logs

    found = Logs(rundir.find(run_dir, port) / "log", service)
    for line in found.last(lines):
        print(line)
    while follow:
        for line in found.new():
            print(line, flush=True)
        time.sleep(0.2)


@app.command()
def story(
    request: Annotated[str, typer.Argument(help="Request id or sequence number; with --crash a process.")] = "",
    crash: Annotated[bool, typer.Option("--crash", help="Tell why the process that died last did.")] = False,
    as_json: AsJson = False,
    run_dir: RunDir = "",
    port: Port = None,
) -> None:
    """Tell what happened to a request, or why a process died."""
    from valence import rundir
    from valence.story import ask, document

    told, others = ask(rundir.find_recorded(run_dir, port), request, crash)
    if as_json:
        print(json.dumps(document(told)))
        return
    from rich.console import Console

    from valence.story_display import show

    Console(highlight=False).print(show(told, others))


@app.command()
def chat(
    url: Annotated[str, typer.Option("--url", help="Base URL; empty: the server that runs here.")] = "",
    model: Annotated[str, typer.Option("--model", help="Name of the model; empty: the first one.")] = "",
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer.")] = 1024,
    temperature: Annotated[float | None, typer.Option("--temperature")] = None,
    api_key: ApiKey = "",
    run_dir: RunDir = "",
    port: Port = None,
) -> None:
    """Talk to a model in the terminal."""
    import httpx
    from rich.console import Console

    from valence import rundir
    from valence.chat import Conversation, authorization, converse, served_model

    base = url or rundir.url(rundir.running_config(rundir.find(run_dir, port)))
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    headers = authorization(api_key or env.api_key())
    with httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(10.0, read=None)) as client:
        name = model or served_model(client)
        converse(Console(), Conversation(client, name, options, system), name)


app.add_typer(keys, name="keys")


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the architectures that can be served."""
    from valence.listings import models as listed

    print_listing(listed(), as_json)


@app.command()
def kv(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, or bundled.")] = "",
    eg_latent: Annotated[int, typer.Option("--eg-latent", min=0, help="Of EG-MLA; 0: the paper's least.")] = 0,
    as_json: AsJson = False,
    config: ConfigFile = "",
    settings: Settings = None,
) -> None:
    """Show what a token costs in the KV cache, by this attention and by others, and what whole sequences take."""
    from valence.listings import kept
    from valence.listings import kv as listed

    loaded = _load(config, model, None, "", settings)
    by_attention, by_layers = listed(loaded, eg_latent), kept(loaded)
    if as_json:
        print_listing([*by_attention, *by_layers], as_json)
    else:
        print_listing(by_attention, as_json)
        print_listing(by_layers, as_json)


@app.command()
def fetch(model: Model = "", config: ConfigFile = "", settings: Settings = None) -> None:
    """Find the model, download it from the hub if it is not here, and print where its files are."""
    from common.model_source import resolve

    print(resolve(_load(config, model, None, "", settings).model.source).path)


@app.command()
def ops(as_json: AsJson = False, device: Device = "", config: ConfigFile = "", settings: Settings = None) -> None:
    """List the operations, which provider runs each on this host, and why."""
    from valence.listings import ops as listed

    print_listing(listed(_load(config, "", None, device, settings).worker), as_json)


app.command()(doctor)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context, name: Annotated[str, typer.Argument(help="scheduler, chain, bundled, http ...")]
) -> None:
    """Run one benchmark; what follows the name goes to it."""
    import runpy
    from importlib.util import find_spec

    if not name.isidentifier() or find_spec(f"benchmarks.{name}") is None:
        found = sorted(path.stem for path in Path(__file__).parents[1].glob("benchmarks/[a-z]*.py"))
        _fail(f"no benchmark {name!r}; there are {', '.join(found)}")
    sys.argv = [f"benchmarks.{name}", *context.args]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(f"valence {installed('valence')}, Python {sys.version.split()[0]}")


def _fail(message: str, status: int = 1) -> NoReturn:
    print(f"valence: {message}", file=sys.stderr)
    sys.exit(status)


def main() -> None:
    """Entry point of the `valence` script. Errors meant for people are one line, without a traceback."""
    try:
        app()
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    except CommandError as error:
        _fail(str(error))


if __name__ == "__main__":
    main()
