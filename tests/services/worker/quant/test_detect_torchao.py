"""torchao's configurations: objects by name, and what of them stops with its name."""

import copy
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from services.worker.quant.detect import read_rules
from services.worker.quant.rules import Rules
from services.worker.quant.scheme import GROUP, ROW, Numbers, Scheme
from tests.services.worker.quant.coded_checkpoints import DENSE, is_coded, random_tensors, write
from tests.services.worker.quant.loading import load, logits
from tests.services.worker.quant.torchao_checkpoints import (
    BLOCKS,
    FP8_WEIGHT,
    INT4,
    INTX,
    ROWS,
    fp8_both,
    fp8_rows,
    int4_packed,
    int8_both,
    int8_rows,
    int8_weight,
    torchao,
)

INT8 = int8_weight(ROWS)
BY_NAME = {
    "model.layers.0.self_attn.o_proj.weight": INT8,
    r"re:.*\.down_proj": None,
    "re:.*(gate|up)_proj.weight": INT4,
    "model.embed_tokens": INT8,
    "_default": fp8_both([ROWS, ROWS]),
}


def by_name(objects: dict[str, Any]) -> dict[str, Any]:
    """Both names of the table, as torchao writes them."""
    fields = {"fqn_to_config": objects, "module_fqn_to_config": objects}
    return torchao({"_type": "FqnToConfig", "_version": 1, "_data": fields})


def read(settings: dict[str, Any]) -> Rules:
    rules = read_rules({"quantization_config": settings}, "config.json")
    assert rules is not None
    return rules


def test_one_object_for_all() -> None:
    assert read(torchao(INT8)).scheme_of("model.layers.0.mlp.up_proj") == Scheme("torchao", Numbers("int8", ROW))
    packed = Scheme("torchao-packed", Numbers("int4", GROUP, 32, symmetric=False))
    assert read(torchao(INT4)).scheme_of("lm_head") == packed


def test_objects_by_name() -> None:
    rules = read(by_name(BY_NAME))
    schemes = {
        name: rules.scheme_of(f"model.layers.0.{name}")
        for name in ("self_attn.o_proj", "self_attn.o_proj_b", "mlp.up_proj", "mlp.down_proj", "mlp.down_proj.x")
    }
    kinds = {name: None if scheme is None else scheme.weight.kind for name, scheme in schemes.items()}
    assert kinds == {
        "self_attn.o_proj": "int8",
        "self_attn.o_proj_b": "fp8",
        "mlp.up_proj": "int4",
        "mlp.down_proj": None,
        "mlp.down_proj.x": "fp8",
    }


def test_each_module_is_kept_as_its_object_says(tmp_path: Path) -> None:
    """The embedding, too, whose rows are read out of its codes."""
    tensors, meant = {}, {}
    for name, values in random_tensors(DENSE).items():
        code = int8_rows if "o_proj" in name or "embed" in name else int4_packed if "gate" in name else fp8_rows
        code = int4_packed if "up_proj" in name else code
        if "down_proj" in name or not (is_coded(name, values) or "embed" in name):
            tensors[name] = meant[name] = values
            continue
        pieces, meant[name] = code(values)
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": piece for suffix, piece in pieces.items()}
    decoder, _ = load(write(tmp_path / "coded", DENSE, tensors, by_name(BY_NAME)))
    twin, _ = load(write(tmp_path / "twin", DENSE, meant))
    layer: Any = decoder.layers[0]
    weights = (layer.attention.project, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    assert [one.weight.format_name for one in weights] == ["fp8", "int8_weight", "int4", "none"]
    found, wanted = logits(decoder), logits(twin)
    assert float((found - wanted).norm() / wanted.norm()) < 0.1


def changed(made: dict[str, Any], **fields: Any) -> dict[str, Any]:
    made = copy.deepcopy(made)
    made["_data"] |= fields
    return torchao(made)


def word(text: str) -> dict[str, Any]:
    return {"_type": "Enum", "_data": text}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "'quant_type' is 'int4_weight_only'"),
        ({"quant_method": "torchao"}, "'quant_type' has no 'default'"),
        ({**torchao(INT8), "rotated": 1}, "'rotated' is not known"),
        (torchao({**INT8, "_type": "NVFP4InferenceConfig"}), "'_type' is 'NVFP4InferenceConfig', supported: .*Int8W"),
        (torchao({**INT8, "_version": 1}), "'_version' is 1, supported: 2"),
        (changed(INT8, group_size=32), "'group_size' is 32, supported: none"),
        (changed(INT8, rotated=True), "'rotated' is not known"),
        (changed(INT8, granularity=None), "'granularity' is missing"),
        (changed(INT8, granularity={"_type": "PerChunk", "_data": {}}), "'_type' is 'PerChunk'"),
        (changed(INT8, granularity={"_type": "PerRow", "_data": {"dim": 0}}), "'dim' is 0"),
        (changed(INT8, granularity={"_type": "PerGroup", "_data": {"group_size": 8}}), "'group_size' is 8"),
        (changed(INT8, granularity=BLOCKS[1]), "int8 per block of 128.* is not supported"),
        (changed(int8_both(ROWS), act_mapping_type=word("ASYMMETRIC")), "int8 per row, asymmetric .* not supported"),
        (changed(int8_both(ROWS), reduce_range=True), "'reduce_range' is True"),
        (changed(int8_both(ROWS), granularity=[ROWS]), "'granularity' is .*expected one table or two"),
        (changed(FP8_WEIGHT, weight_dtype=word("float8_e5m2")), "'weight_dtype' is 'float8_e5m2'"),
        (changed(FP8_WEIGHT, granularity=BLOCKS[1]), "fp8 per block of 128, activations as they are .* not supported"),
        (changed(fp8_both(ROWS), activation_value_ub=1200.0), "'activation_value_ub' is 1200.0, supported: none"),
        (changed(fp8_both(ROWS), packing_format=word("SPARSE_CUTLASS")), "'packing_format' is 'SPARSE_CUTLASS'"),
        (changed(INT4, int4_packing_format=word("TILE_PACKED_TO_4D")), "'int4_packing_format' is 'TILE_PACKED_TO_4D'"),
        (changed(INT4, int4_packing_format=None), "'int4_packing_format' is missing"),
        (changed(INTX, weight_dtype=word("int3")), "int3 per group of 32.* is not supported"),
        (changed(INTX, intx_packing_format=word("OPAQUE_ATEN_AUTO")), "'intx_packing_format' is 'OPAQUE_ATEN_AUTO'"),
        (by_name({"re:(": INT8}), "no regular expression"),
        (by_name({"re:.*": "int8"}), "'re:.*' is 'int8', expected a table"),
    ],
)
def test_what_cannot_be_honoured_stops_with_its_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: quantization_config.*{text}"):
        read(settings)


def test_weights_for_integers_of_other_activations_are_refused() -> None:
    fields = {
        "act_mapping_type": word("ASYMMETRIC"),
        "intx_packing_format": word("UNPACKED_TO_INT8"),
        "weight_dtype": word("int4"),
        "weight_granularity": INTX["_data"]["granularity"],
        "weight_mapping_type": word("SYMMETRIC"),
        "weight_scale_dtype": None,
    }
    with pytest.raises(ConfigError, match=r"int4 per group of 32, activations int8 per row, asymmetric .*is not"):
        read(torchao({"_type": "Int8DynamicActivationIntxWeightConfig", "_version": 2, "_data": fields}))
