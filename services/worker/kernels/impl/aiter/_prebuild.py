"""Builds AITER's modules before anybody needs them, by AITER's own builder: a child process of
services/worker/prebuild.py.

`python -m services.worker.kernels.impl.aiter._prebuild PATTERN`, with GPU_ARCHS, AITER_JIT_DIR and AITER_AOT_IMPORT
set: AITER then loads its builder only, which needs no GPU. A line of JSON per module on standard output; AITER's own
words go to standard error. Modules that are there already are left alone.
"""

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LISTED = "optCompilerConfig.json"
# Not for serving on these GPUs: gradients, tuners, other architectures, what AITER itself calls experimental.
NEVER = re.compile(r".*(_bwd|_tune|gfx1250|experimental|^lib).*")


def names(core: Any, pattern: str) -> list[str]:
    """Modules of the installed release that fit the pattern and serve inference."""
    listed = json.loads((Path(core.__file__).parent / LISTED).read_text())
    return [name for name in listed if re.fullmatch(pattern, name) and not NEVER.fullmatch(name)]


def build(core: Any, name: str) -> None:
    """Raises what AITER raises."""
    taken = inspect.signature(core.build_module).parameters
    arguments = {key: value for key, value in core.get_args_of_build(name).items() if key in taken}
    core.build_module(**{**arguments, "md_name": name})


def run(core: Any, pattern: str, there: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """A record before and after each module."""
    wanted = names(core, pattern)
    for done, name in enumerate(wanted):
        record = {"module": name, "done": done, "total": len(wanted)}
        if there(name):
            yield {**record, "state": "there"}
            continue
        yield {**record, "state": "building"}
        try:
            build(core, name)
        except (RuntimeError, OSError, ImportError, KeyError, TypeError, ValueError, AssertionError) as error:
            yield {**record, "state": "failed", "why": str(error).partition("\n")[0][:300]}
        else:
            yield {**record, "state": "built"}


def main() -> None:
    own = os.dup(1)
    os.dup2(2, 1)  # compilers print there
    core = importlib.import_module("aiter.jit.core")
    folder = Path(core.get_user_jit_dir())
    for record in run(core, sys.argv[1], lambda name: (folder / f"{name}.so").exists()):
        os.write(own, json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    main()
