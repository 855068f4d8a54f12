"""Which provider each op would be bound to on an AMD GPU, per model, architecture and release of AITER.

Nothing is run: AITER's signatures are those of signatures.json (see fake.py), Triton's kernels are there anyway. So the
table says what is chosen by shape, architecture and signature; the self-test at start may still drop a choice.
`python -m tests.services.worker.kernels.impl.aiter.op_table --write docs/rocm.md`.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.models import SHAPES, config_of
from services.worker.kernels.registry import Bindings, Facts, all_ops, bind, find_impls
from services.worker.model_engine import facts_of
from services.worker.models import registry
from services.worker.models.spec import Config
from tests.services.worker.kernels.impl.aiter.fake import NEW, OLD, install

MODELS = ("0.6b", "8b", "30b-a3b", "gpt-oss-20b", "glm-air-16", "deepseek-v3-cut")
ARCHES = ("gfx942", "gfx950")
BEGIN = "<!-- python -m tests.services.worker.kernels.impl.aiter.op_table --write docs/rocm.md -->"
END = "<!-- end of the op table -->"
PRIORITY = ("aiter", "triton", "torch")


def facts(model: str, arch: str) -> Facts:
    config = config_of(SHAPES[model])
    _, definition = registry.find_model(config["architectures"])
    spec = definition.read(Config(config))
    found = facts_of(torch.device("cpu"), torch.bfloat16, spec, 16, torch.bfloat16)
    return Facts("cuda", arch, found.dtype, found.shapes)


def bound(model: str, arch: str, release: str) -> Bindings:
    with pytest.MonkeyPatch.context() as patch:
        install(patch, release, arch)
        return bind(PRIORITY, facts(model, arch), finder=find_impls)


def table() -> str:
    """Markdown: ops by model; the older release behind a slash, gfx950 behind a dot, where they differ."""
    found = {key: bound(*key) for key in itertools.product(MODELS, ARCHES, (NEW, OLD))}
    lines = ["| op | " + " | ".join(MODELS) + " |", "| --- |" + " --- |" * len(MODELS)]

    def cell(model: str, of: Callable[[Bindings], str]) -> str:
        by_arch = [" / ".join(dict.fromkeys(of(found[model, arch, new]) for new in (NEW, OLD))) for arch in ARCHES]
        return " · ".join(dict.fromkeys(by_arch))

    rest: list[str] = []
    for name, op in all_ops().items():
        cells = [cell(model, lambda bindings, op=op: bindings.provider(op)) for model in MODELS]
        if "aiter" in " ".join(cells):
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
        else:
            rest.append(name)
    lines.append("| KV pages | " + " | ".join(cell(model, lambda bindings: bindings.layout) for model in MODELS) + " |")
    lines += ["", "By Triton or torch everywhere: " + ", ".join(f"`{op}`" for op in sorted(rest)) + "."]
    return "\n".join(lines)


def written(document: str) -> str:
    """The document with the present table between its marks."""
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="document with the marks")
    path: Path | None = parser.parse_args().write
    if path is None:
        print(table())
    else:
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
