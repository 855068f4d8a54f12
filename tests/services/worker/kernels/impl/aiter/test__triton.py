"""Where AITER's compiled part is not installed: which calls its Triton part takes over, and what those compute."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.worker.kernels.impl.aiter.bare import SERVED
from tests.services.worker.kernels.impl.aiter.test_contract import ROOT
from tests.services.worker.kernels.impl.aiter.test_contract import wheel as wheel

ARCH = "gfx950"  # the interpreter lacks gfx942's type of 8 bits
LACKING = {"silu_and_mul": "this host has no aiter.silu_and_mul"}  # in this release


@pytest.fixture(scope="module")
def report(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = "tests.services.worker.kernels.impl.aiter.bare"
    command = [sys.executable, "-m", module, str(wheel), ARCH, str(tmp_path_factory.mktemp("bare"))]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SERVED)
def test_the_wheels_triton_kernels_are_the_meaning(report: Any, name: str) -> None:
    wanted = f"not bound: {LACKING[name]}" if name in LACKING else "passed"
    assert report[name] and set(report[name].values()) == {wanted}, report[name]
