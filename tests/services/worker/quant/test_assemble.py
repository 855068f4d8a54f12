"""Bad checkpoints stop with the tensor and the file, before anything of them is multiplied; scales of the KV cache."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from services.worker.quant.assemble import take_kv_scales
from tests.services.worker.quant.coded_checkpoints import DENSE, coded, random_tensors, write
from tests.services.worker.quant.kinds import GPTQ, KINDS
from tests.services.worker.quant.loading import load

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
Change = Callable[[dict[str, Tensor]], object]


def refused(folder: Path, name: str, change: Change, settings: Any = None) -> str:
    tensors, _ = coded(KINDS[name], random_tensors(DENSE))
    change(tensors)
    write(folder, DENSE, tensors, KINDS[name].settings if settings is None else settings)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    return str(caught.value)


def put(suffix: str, value: Tensor | None, module: str = Q) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        if value is None:
            del tensors[f"{module}.{suffix}"]
        else:
            tensors[f"{module}.{suffix}"] = value

    return change


def fill(suffix: str, value: float) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.{suffix}"].view(-1)[:1] = value

    return change


WRONG: list[tuple[str, Change, str]] = [
    ("compressed_fp8", put("weight_scale", None), f'lacks "{Q}.weight_scale" .*model.safetensors'),
    ("autofp8_static", put("input_scale", None), f'lacks "{Q}.input_scale"'),
    ("awq", put("qzeros", None), f'lacks "{Q}.qzeros"'),
    ("awq", put("qweight", None), f'lacks "{Q}.qweight"'),
    ("gptq_ordered", put("g_idx", None), f'lacks "{Q}.g_idx"'),
    (
        "deepseek",
        put("weight_scale_inv", torch.ones(2, 1)),
        r"weight_scale_inv\" has shape \[2, 1\], expected \[1, 1\]",
    ),
    (
        "compressed_int8",
        put("weight_scale", torch.ones(64, 1)),
        r"weight_scale\" has shape \[64, 1\], expected \[128\]",
    ),
    ("gptq", put("scales", torch.ones(2, 120).half()), r"scales\" has shape \[2, 120\], expected \[2, 128\]"),
    ("compressed_fp8", fill("weight_scale", float("nan")), f'"{Q}.weight_scale" holds scales that are NaN'),
    ("awq", fill("scales", 0.0), f'"{Q}.scales" holds scales that are zero'),
    ("deepseek", fill("weight_scale_inv", float("inf")), "scales that are NaN or infinite"),
    ("quark_mxfp4", fill("weight_scale", 255), "scales that are NaN"),
    ("autofp8_static", fill("input_scale", 0.0), f'"{Q}.input_scale" holds scales that are zero'),
    ("compressed_fp8", put("weight", torch.ones(128, 128, dtype=torch.int8)), "stored as I8, expected F8_E4M3"),
    ("compressed_fp8", put("weight", torch.ones(128, 128)), f'stored as F32, but there is "{Q}.weight_scale"'),
    ("awq", put("qweights", torch.ones(3)), f'no place for "{Q}.qweights"'),
    ("gptq", put("g_idx", torch.arange(128).flip(0).int()), 'q_proj.weight": g_idx puts columns out of order'),
    ("gptq_ordered", put("g_idx", torch.zeros(128).int()), "g_idx does not put as many columns in each of 2 groups"),
    ("gptq_eight", put("qzeros", torch.zeros(2, 32).int()), "zero points of 8 bits other than 128"),
    ("compressed_int8", put("weight_zero_point", torch.ones(128, 1).int()), "zero points other than 0"),
    ("quark_int4", put("weight_zero_point", None), f'lacks "{Q}.weight_zero_point"'),
    ("quark_uint4", put("weight", torch.zeros(128, 8).int()), r"q_proj.weight\" has shape \[128, 8\], expected"),
    ("quark_int4_rows", fill("weight_scale", 0.0), f'"{Q}.weight_scale" holds scales that are zero'),
    ("torchao_int8", put("_weight_scale", None), f'lacks "{Q}._weight_scale" .*model.safetensors'),
    ("torchao_int8", fill("_weight_zero_point", 1), "zero points other than 0"),
    ("torchao_int8", put("weight", torch.ones(128, 128)), f'stored as F32, but there is "{Q}._weight_scale"'),
    ("torchao_fp8", fill("_weight_scale", float("nan")), f'"{Q}._weight_scale" holds scales that are NaN'),
    ("torchao_fp8", put("_weight_scale", torch.ones(64, 1)), r"_weight_scale\" has shape \[64, 1\], expected \[128\]"),
    ("torchao_int4", fill("_weight_zero_point", float("inf")), f'"{Q}.weight": zero points that are NaN or infinite'),
    ("torchao_int4", fill("_weight_scale", 0.0), f'"{Q}._weight_scale" holds scales that are zero'),
    ("torchao_intx", fill("_weight_qdata", 9), f'"{Q}.weight": numbers of more than 4 bits'),
    ("torchao_intx", put("_weight_zero_point", None), f'lacks "{Q}._weight_zero_point"'),
]


@pytest.mark.parametrize(("name", "change", "text"), WRONG)
def test_a_bad_tensor_is_named(name: str, change: Change, text: str, tmp_path: Path) -> None:
    said = refused(tmp_path, name, change)
    assert re.search(text, said), said
    assert str(tmp_path / "model.safetensors") in said


def test_parts_of_a_product_must_be_coded_alike(tmp_path: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{K}.weight_scale"]
        tensors[f"{K}.weight"] = torch.ones(64, 128)

    said = refused(tmp_path, "compressed_fp8", widen)
    assert f'"{K}.weight" is stored as F32, but "{Q}.weight" as fp8' in said and "coded alike" in said


def test_groups_must_divide(tmp_path: Path) -> None:
    said = refused(tmp_path, "gptq", lambda tensors: None, {**GPTQ, "group_size": 48})
    assert "groups of 48 do not divide the 128 columns" in said and "model.safetensors" in said


def test_what_the_rules_and_the_file_say_must_be_the_same(tmp_path: Path) -> None:
    none = refused(tmp_path / "a", "compressed_fp8", lambda tensors: None, settings={})
    assert f'"{Q}.weight" is stored as F8_E4M3, but config.json has no quantization_config' in none
    settings = {"quant_method": "fp8", "modules_to_not_convert": ["q_proj"]}
    left = refused(tmp_path / "b", "fp8_dynamic", lambda tensors: None, settings)
    assert f'"{Q}.weight" is stored as F8_E4M3, but its fp8 excepts it' in left


def test_modules_that_are_left_out_are_dense(tmp_path: Path) -> None:
    dense = random_tensors(DENSE)
    tensors, _ = coded(KINDS["deepseek"], {name: t for name, t in dense.items() if "down_proj" not in name})
    tensors["model.layers.0.mlp.down_proj.weight"] = dense["model.layers.0.mlp.down_proj.weight"]
    settings = {**KINDS["deepseek"].settings, "modules_to_not_convert": ["model.layers.0.mlp.down_proj", "lm_head"]}
    mlp: Any = load(write(tmp_path, DENSE, tensors, settings))[0].layers[0].mlp
    assert (mlp.gate_up.weight.format_name, mlp.down.weight.format_name) == ("fp8_block", "none")


def test_scales_of_keys_and_values_are_read(tmp_path: Path) -> None:
    tensors, _ = coded(KINDS["compressed_fp8"], random_tensors(DENSE))
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.25)
    tensors["model.layers.0.self_attn.v_scale"] = torch.tensor([0.5])
    tensors["model.layers.0.self_attn.q_scale"] = torch.tensor([0.5])
    _, parameters = load(write(tmp_path, DENSE, tensors, KINDS["compressed_fp8"].settings))
    assert parameters.kv_scales == {0: (0.25, 0.5)}


def test_bad_scales_of_keys_and_values(tmp_path: Path) -> None:
    for change, text in (
        ({"k_scale": torch.tensor(1.0)}, "layer 0 has a scale of k only"),
        ({"k_scale": torch.tensor(0.0), "v_scale": torch.tensor(1.0)}, "zero"),
        ({"k_scale": torch.ones(2), "v_scale": torch.tensor(1.0)}, r"shape \[2\], expected one number"),
    ):

        def add(tensors: dict[str, Tensor], change: dict[str, Tensor] = change) -> None:
            tensors.update({f"model.layers.0.self_attn.{name}": value for name, value in change.items()})

        assert re.search(text, refused(tmp_path, "compressed_fp8", add))


def test_quarks_names_of_kv_scales() -> None:
    class One:
        name, source, storage, shape = "a", "b", "F32", ()

        def dense(self, dtype: torch.dtype) -> Tensor:
            return torch.tensor(0.5, dtype=dtype)

    tensors: Any = {f"model.layers.3.self_attn.{part}_proj.output_scale": One() for part in ("q", "k", "v")}
    assert take_kv_scales(tensors) == {3: (0.5, 0.5)} and tensors == {}
