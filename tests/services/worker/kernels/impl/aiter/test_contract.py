"""The provider against AITER's own wrappers, of the release that PyPI has: `make setup` puts its wheel into .venv."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.aiter_signatures import Source, declared, signature
from services.worker.kernels.impl.aiter import _host
from services.worker.kernels.registry import all_ops
from tests.services.worker.kernels.impl.aiter.cases import CASES
from tests.services.worker.kernels.impl.aiter.fake import NEW, OLD
from valence.bootstrap import AITER_WHEEL, WHEELS

ROOT = Path(__file__).resolve().parents[6]
ARCHES = ("gfx942", "gfx950")
# What of a case must have been launched: compiled module (or triton), op.
LAUNCHED = {
    "rms_norm": [["module_rmsnorm", "rmsnorm2d_fwd"]],
    "add_rms_norm": [["module_rmsnorm", "rmsnorm2d_fwd_with_add"]],
    "silu_and_mul": [["module_activation", "silu_and_mul"]],
    "gelu_and_mul": [["module_activation", "gelu_tanh_and_mul"]],
    "rope": [["module_rope_general_fwd", "rope_cached_fwd_impl"]],
    "kv_write": [["module_cache", "reshape_and_cache_flash"]],
    "rope_kv_write": [
        ["module_rope_general_fwd", "rope_cached_2c_fwd_impl"],
        ["module_cache", "reshape_and_cache_flash"],
    ],
    "paged_attention": [["triton", "kernel_unified_attention_2d"]],
    "add_norm_quantize_rows": [["module_rmsnorm", "rmsnorm2d_fwd_with_add_dynamicquant"]],
    "argmax": [["module_sample", "greedy_sample"]],
    "mla_decode": [["module_mla_asm", "mla_decode_stage1_asm_fwd"], ["triton", "_fwd_kernel_stage2_asm"]],
    "mla_prefill": [["module_mla_asm", "mla_prefill_asm_fwd"]],
    "moe_block_scaled": [
        ["module_moe_sorting", "moe_sorting_fwd"],
        ["module_quant", "dynamic_per_token_scaled_quant"],
    ],
    "moe_int4_whole": [["triton", "_fused_moe_kernel_gptq_awq"]],
    "moe_route": [["module_moe_asm", "topk_softmax"]],
    "moe_route_biased": [["module_moe_asm", "biased_grouped_topk"]],
    "moe_route_grouped": [["module_moe_asm", "grouped_topk"]],
    "moe_row_scaled": [["module_moe_sorting", "moe_sorting_fwd"], ["module_quant", "dynamic_per_token_scaled_quant"]],
    "moe_tensor_scaled": [["module_moe_sorting", "moe_sorting_fwd"], ["module_quant", "dynamic_per_tensor_quant"]],
    "moe_tiled": [["module_moe_sorting", "moe_sorting_fwd"]],
    "norm_quantize_rows": [["module_rmsnorm", "rmsnorm2d_fwd_with_dynamicquant"]],
    "quantize_groups": [["module_quant", "dynamic_per_token_scaled_quant"]],
    "quantize_rows": [["module_quant", "dynamic_per_token_scaled_quant"]],
    "quantize_tensor": [["module_quant", "dynamic_per_tensor_quant"]],
}
# What this release lacks; MXFP4's products want memory for the result there.
LACKING = {"add_norm_quantize_groups", "norm_quantize_groups", "silu_quantize_groups", "mxfp4_linear", "quantize_mxfp4"}
LACKING |= {"moe_mxfp4_paired", "moe_mxfp8", "norm_quantize_mxfp4"}
ONLY_ON = {"moe_mxfp4": "gfx950"}


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = list((Path(sys.prefix) / WHEELS.name).glob("amd_aiter-*.whl"))
    assert found, f"{AITER_WHEEL} is not in {sys.prefix}/{WHEELS.name}: run make setup"
    return found[0]


def drive(wheel: Path, arch: str, folder: Path, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.services.worker.kernels.impl.aiter.contract", str(wheel), arch, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="module", params=ARCHES)
def report(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = drive(wheel, request.param, tmp_path_factory.mktemp(request.param), TRITON_INTERPRET="0")
    return found | {"arch": request.param}


def test_every_call_binds_and_runs(report: dict[str, Any]) -> None:
    assert report["failed"] == {}
    varlen = {
        call[1] for run, calls in report["runs"].items() if run.startswith("mla_expanded") for call in calls or []
    }
    # keys of 192 numbers have an assembly kernel on gfx950
    assert varlen == {"mha_varlen_fwd", *(["fmha_v3_varlen_fwd"] if report["arch"] == "gfx950" else [])}
    for name in CASES:
        ran = [calls for run, calls in report["runs"].items() if run.split()[0] == name]
        here = name not in LACKING and ONLY_ON.get(name, report["arch"]) == report["arch"]
        assert any(isinstance(calls, list) and calls for calls in ran) == here, name


def test_no_keyword_may_be_another(report: dict[str, Any]) -> None:
    """Its wrappers take what they are given, but somewhere behind them a name that nobody knows is an error."""
    assert report["unnoticed"] == []


def test_the_right_kernels_are_launched(report: dict[str, Any]) -> None:
    for name, wanted in LAUNCHED.items():
        ran = [calls for run, calls in report["runs"].items() if run.split()[0] == name and calls]
        assert ran
        for calls in ran:
            launched = [call[:2] for call in calls] if isinstance(calls, list) else wanted
            assert all(call in launched or name == "paged_attention" for call in wanted), (name, launched)
        assert name != "paged_attention" or any(call[:2] == wanted[0] for calls in ran for call in calls)


def test_experts_run_by_kernels_for_tiles(report: dict[str, Any]) -> None:
    """`preshuffle_on` is AITER's name for them: it goes by a mark on the tensor object."""
    ran = {run: calls for run, calls in report["runs"].items() if run.startswith("moe_tiled") and calls}
    modules = {call[0] for calls in ran.values() for call in calls if call[1].startswith("ck_moe_stage")}
    assert modules and all("preshuffle_on" in module for module in modules)


def test_what_the_host_takes_is_what_the_file_lists(report: dict[str, Any]) -> None:
    """Found on the imported package by signatures and schemas, against what was read from its sources."""
    listed = _host.releases()[OLD]
    known = [found for found in report["parameters"].values() if isinstance(found, list)]
    assert len(known) >= 12
    for place, parameters in known:
        wanted = listed[place]
        assert wanted is not None and set(parameters) <= set(wanted), place
        assert {name for name, must in wanted.items() if must} == {name for name, must in parameters.items() if must}
    for place, found in report["parameters"].items():
        assert isinstance(found, list) or listed[place] is None, found


def test_triton_kernels_of_the_wheel_compute_what_is_meant(wheel: Path, tmp_path: Path) -> None:
    """Interpreted: causal rows, windows, soft caps, sinks and 8 bits as AITER understands what we pass.

    As gfx950, because the interpreter lacks gfx942's type of 8 bits.
    """
    report = drive(wheel, "gfx950", tmp_path, TRITON_INTERPRET="1")
    assert report["failed"] == {}
    assert {f"paged_attention {case.name}" for case in CASES["paged_attention"]} == set(report["compared"])


def test_the_file_is_of_this_wheel(wheel: Path) -> None:
    """Newer releases are not on PyPI: their part of the file is from a source tree, by the same reader."""
    source = Source(wheel)
    written = json.loads(_host.SIGNATURES.read_text())[OLD]
    assert AITER_WHEEL.endswith(OLD)
    assert {place: signature(source, place) for place in written} == written


def test_the_newer_release_has_all_that_is_called_and_wants_no_more() -> None:
    rows = _host.releases()[NEW]
    for function in declared():
        place = next(place for place in function.places if rows[place] is not None)
        parameters = rows[place]
        assert parameters is not None and set(function.needs) <= set(parameters), place
        assert {name for name, must in parameters.items() if must} <= {*function.needs, *function.takes}, place


def test_all_cases_are_of_ops() -> None:
    assert CASES.keys() <= all_ops().keys()
