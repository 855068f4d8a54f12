"""AITER's kernels against the ops' meanings: all of them, case by case, on an AMD GPU, also of ops that no model calls
yet; on another maker's its Triton kernels, from a release without its compiled part.

AITER_SOURCES names wheels or source trees, like a PATH; without it what `make setup` put into the virtual environment.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gate import check
from services.worker.kernels.registry import all_ops, find_impls
from tests.gpu.conftest import SMALL
from tests.services.worker.kernels.impl.aiter.bare import SERVED
from valence.bootstrap import WHEELS

IMPLS, REASON = find_impls("aiter")
DEVICE = torch.device("cuda", 0)
SOURCES = [*filter(None, os.environ.get("AITER_SOURCES", "").split(os.pathsep))] or [
    str(path) for path in (Path(sys.prefix) / WHEELS.name).glob("amd_aiter-*.whl")
]
ROOT = Path(__file__).resolve().parents[2]
on_amd = pytest.mark.skipif(not torch.version.hip, reason="needs an AMD GPU")
elsewhere = pytest.mark.skipif(bool(torch.version.hip), reason="an AMD GPU runs all of AITER")


def test_an_amd_host_has_the_provider() -> None:
    """And no other has: a test of its ops that finds none must not look like one that passed."""
    assert bool(IMPLS) == bool(torch.version.hip), REASON


@on_amd
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", all_ops())
def test_is_the_meaning(name: str, dtype: torch.dtype) -> None:
    if name in IMPLS and not all_ops()[name].in_cache:  # pages have tests of their own, which know their layout
        check(IMPLS[name], DEVICE, dtype)


def ran(*arguments: str) -> Any:
    """What a process with AITER's Triton part alone reports. It may die: a fault of the GPU ends only that process."""
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@cache
def ran_ops(source: str, arch: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return ran("tests.services.worker.kernels.impl.aiter.bare", source, arch, folder)


@elsewhere
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: Path(source).name)
def test_triton_kernels_are_the_meaning(source: str, arch: str, name: str) -> None:
    """Every case is passed, or refused by Triton on this GPU, which says why."""
    report = ran_ops(source, arch)[name]
    print(*(f"{name} {case}: {how}" for case, how in report.items()), sep="\n")
    assert not {case: how for case, how in report.items() if how.startswith(("wrong", "failed"))}
    # gfx942's type of 8 bits is no other GPU's, and releases lack functions
    left = [how for how in report.values() if not how.startswith("not bound") and "fp8e4b8" not in how]
    assert "passed" in left or not left, report


@elsewhere
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: Path(source).name)
def test_logits_of_models(source: str, name: str, tmp_path: Path) -> None:
    """As near to fp32 as transformers' own bf16 is, with what AITER's Triton part serves served by it."""
    report = ran("tests.gpu.aiter_model", source, name, str(tmp_path))
    print(name, json.dumps(report))
    assert {"rms_norm", "linear", "add_linear", "norm_linear", "rope_kv_write", "paged_attention"} <= {*report["ops"]}
    assert report["launched"]["kernel_unified_attention_2d"] > 0 and report["launched"]["_gemm_a16_w16_kernel"] > 0
    assert report["finite"] and report["error"] <= 2 * report["error_of_bf16"]
    assert report["same_best"] >= report["same_best_of_bf16"] - 0.02
