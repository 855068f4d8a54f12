"""The command `valence doctor`: a thin layer over doctor.py and, for --prebuild, the worker's prebuild.py."""

import json
import sys
from typing import Annotated

import typer

from common.config import Config
from valence.options import AsJson, ConfigFile, Settings, load_config

Model = Annotated[str, typer.Option("--model", help="Folder, .gguf file, hub id, or bundled.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda (also for ROCm).")]


def doctor(
    model: Model = "",
    device: Device = "",
    as_json: AsJson = False,
    test: Annotated[bool, typer.Option("--test/--no-test", help="Hold kernels against torch.")] = True,
    again: Annotated[bool, typer.Option("--again", help="Test also what is known.")] = False,
    prebuild: Annotated[str, typer.Option("--prebuild", metavar="ARCHS", help="Build AITER for gfx942,gfx950.")] = "",
    modules: Annotated[str, typer.Option("--modules", help="With --prebuild: which, a regular expression.")] = ".*",
    config: ConfigFile = "",
    settings: Settings = None,
) -> None:
    """Look at this host like a worker will; say what is wrong and what to do. Exit status 1 if something is."""
    named = {"model.source": model, "worker.device": device}
    own = [f"{key}={json.dumps(value)}" for key, value in named.items() if value]
    tree = load_config(config, [*own, *(settings or [])])
    sys.exit(_prebuild(tree, prebuild.split(","), modules) if prebuild else _examine(tree, test, again, as_json))


def _examine(tree: Config, test: bool, again: bool, as_json: bool) -> int:
    from rich.console import Console

    from valence.doctor import document, judge
    from valence.doctor_display import report
    from valence.doctor_host import examine
    from valence.doctor_ops import with_ops

    console = Console(stderr=as_json)
    with console.status("looks at the host") as line:
        host = with_ops(examine(tree), tree, test, again, lambda what, done: line.update(f"tests {what} ({done} done)"))
    findings = judge(host)
    found = document(host, findings)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        console.print(report(host, findings))
    return 0 if found["ok"] else 1


def _prebuild(tree: Config, archs: list[str], modules: str) -> int:
    from services.worker.builders import cache_root
    from services.worker.prebuild import prebuild

    failed = 0
    for step in prebuild(archs, modules, cache_root(tree), _waiting):
        failed += step.state == "failed"
        print(f"{step.arch} {step.done + 1}/{step.total} {step.module} {step.state} {step.why}".rstrip(), flush=True)
    return 1 if failed else 0


def _waiting(waited_s: float, holder: str) -> None:
    print(f"waits for the builder with pid {holder or '?'} ({waited_s:.0f} s)", file=sys.stderr, flush=True)
