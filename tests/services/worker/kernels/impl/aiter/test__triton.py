"""Where AITER's compiled part is not installed: which calls its Triton part takes over, and what those compute."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.worker.kernels.impl.aiter.bare import SERVED
from tests.services.worker.kernels.impl.aiter.models import CONFIGS
from tests.services.worker.kernels.impl.aiter.test_contract import ROOT
from tests.services.worker.kernels.impl.aiter.test_contract import wheel as wheel

ARCH = "gfx950"  # the interpreter lacks gfx942's type of 8 bits
NO_EXPERTS = "aiter.ops.triton.moe.moe_routing.routing cannot be imported: No module named 'aiter.ops.triton.moe'"
LACKING = {  # in this release
    "silu_and_mul": "this host has no aiter.silu_and_mul",
    "moe_mxfp4_paired": NO_EXPERTS,
    "moe_mxfp8": NO_EXPERTS,
}
WHOLE = [name for name in CONFIGS if name.startswith(("Llama", "Qwen3Moe", "GptOss"))]


def ran(wheel: Path, folder: Path, *wanted: str) -> Any:
    """What is reported by a process that has AITER's Triton part alone, interpreted."""
    command = [sys.executable, "-m", "tests.services.worker.kernels.impl.aiter.bare", str(wheel), ARCH, str(folder)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, *wanted], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def report(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ran(wheel, tmp_path_factory.mktemp("bare"))


@pytest.mark.parametrize("name", SERVED)
def test_the_wheels_triton_kernels_are_the_meaning(report: Any, name: str) -> None:
    wanted = f"not bound: {LACKING[name]}" if name in LACKING else "passed"
    assert report[name] and set(report[name].values()) == {wanted}, report[name]


@pytest.fixture(scope="module")
def whole(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ran(wheel, tmp_path_factory.mktemp("whole"), ",".join(WHOLE))


@pytest.mark.parametrize("architecture", WHOLE)
def test_whole_models_by_the_wheels_triton_kernels(whole: Any, architecture: str) -> None:
    """Prompts and decode steps, as near to fp32 as torch's own bf16."""
    report = whole[architecture]
    assert {"rms_norm", "linear", "add_linear", "norm_linear", "rope_kv_write", "paged_attention"} <= {*report["ops"]}
    assert report["steps"] == 3 and 0 < report["error"] <= 1.5 * report["error_of_bf16"]
