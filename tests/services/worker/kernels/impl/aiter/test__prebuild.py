"""AITER's builder is asked for what serving needs, with the arguments that this release takes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.worker.kernels.impl.aiter._prebuild import names, run

LISTED = {
    "module_aiter_core": {},
    "module_rmsnorm": {},
    "module_mha_bwd": {},
    "module_gemm_a8w8_tune": {},
    "module_custom_all_reduce_gfx1250": {},
    "module_quant": {},
    "libmha_fwd": {},
}


def core_of(tmp_path: Path, built: list[dict[str, Any]]) -> Any:
    (tmp_path / "optCompilerConfig.json").write_text(json.dumps(LISTED))

    def build_module(md_name: str, srcs: list[str], verbose: bool) -> None:
        if md_name == "module_quant":
            raise RuntimeError("[aiter] build [module_quant] failed !!!!!!\nhipcc: not found")
        built.append({"md_name": md_name, "srcs": srcs, "verbose": verbose})

    def get_args_of_build(name: str) -> dict[str, Any]:
        return {"md_name": "", "srcs": [f"{name}.cu"], "verbose": False, "hip_clang_path": None}

    return SimpleNamespace(
        __file__=str(tmp_path / "core.py"), build_module=build_module, get_args_of_build=get_args_of_build
    )


def test_modules_for_inference(tmp_path: Path) -> None:
    core = core_of(tmp_path, [])
    assert names(core, ".*") == ["module_aiter_core", "module_rmsnorm", "module_quant"]
    assert names(core, "module_(rms.*|nothing)") == ["module_rmsnorm"]


def test_each_is_built_unless_it_is_there_and_a_failure_ends_nothing(tmp_path: Path) -> None:
    built: list[dict[str, Any]] = []
    records = list(run(core_of(tmp_path, built), ".*", lambda name: name == "module_aiter_core"))
    assert [(r["module"], r["state"]) for r in records] == [
        ("module_aiter_core", "there"),
        ("module_rmsnorm", "building"),
        ("module_rmsnorm", "built"),
        ("module_quant", "building"),
        ("module_quant", "failed"),
    ]
    assert built == [{"md_name": "module_rmsnorm", "srcs": ["module_rmsnorm.cu"], "verbose": False}]
    assert records[-1]["why"] == "[aiter] build [module_quant] failed !!!!!!" and records[-1]["total"] == 3
