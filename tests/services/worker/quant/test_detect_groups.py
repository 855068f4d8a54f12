"""Configurations of compressed-tensors and Quark: groups, exceptions, and what of them stops."""

import copy
from typing import Any

import pytest

from common.errors import ConfigError
from services.worker.quant.detect import format_of, read_rules
from services.worker.quant.rules import Rules
from services.worker.quant.scheme import BLOCK, GROUP, ROW, TENSOR, Numbers, Scheme
from tests.services.worker.quant.kinds import FP8_NUMBERS, KINDS, QUARK, QUARK_MX

FP8 = KINDS["compressed_fp8"].settings
INT4 = KINDS["compressed_int4"].settings
INT8 = KINDS["compressed_int8"].settings
QUARK_INT4 = KINDS["quark_int4"].settings


def read(settings: dict[str, Any]) -> Rules:
    rules = read_rules({"quantization_config": settings}, "config.json")
    assert rules is not None
    return rules


def changed(settings: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`path`: keys with "/" between them."""
    result = copy.deepcopy(settings)
    *parents, leaf = path.split("/")
    table = result
    for parent in parents:
        table = table[parent]
    table[leaf] = value
    return result


def test_compressed_tensors() -> None:
    rules = read(FP8)
    token = Numbers("fp8", ROW)
    wanted = Scheme("compressed-tensors", Numbers("fp8", ROW, dynamic=False), token)
    assert rules.scheme_of("model.layers.0.mlp.up_proj") == wanted
    assert rules.scheme_of("lm_head") is None and rules.scheme_of("model.layers.0.mlp.gate") is None


def test_fp8_of_weights_only_is_a_format_of_its_own() -> None:
    scheme = read(changed(FP8, "config_groups/group_0/input_activations", None)).default
    assert scheme is not None and scheme.activation is None and format_of(scheme, "").name == "fp8_weight"


def test_compressed_tensors_in_blocks() -> None:
    weights = {**FP8_NUMBERS, "strategy": "block", "block_structure": [128, 128], "dynamic": False}
    inputs = {**FP8_NUMBERS, "strategy": "group", "group_size": 128, "dynamic": True}
    settings = changed(
        changed(FP8, "config_groups/group_0/weights", weights), "config_groups/group_0/input_activations", inputs
    )
    scheme = read(settings).default
    assert scheme is not None and (scheme.weight.per, scheme.weight.group) == (BLOCK, 128)
    assert scheme.activation == Numbers("fp8", GROUP, 128)


def test_groups_have_targets_of_their_own() -> None:
    other = copy.deepcopy(INT4["config_groups"]["group_0"]) | {"targets": ["re:.*down_proj"]}
    settings = changed(changed(FP8, "config_groups/group_1", other), "format", "mixed-precision")
    down, up = (read(settings).scheme_of(f"model.layers.0.mlp.{name}_proj") for name in ("down", "up"))
    assert down is not None and up is not None and (down.weight.kind, up.weight.kind) == ("int4", "fp8")


def test_quark() -> None:
    rules = read(QUARK)
    mx = Numbers("fp4", GROUP, 32, powers=True)
    assert rules.default == Scheme("quark", Numbers("fp4", GROUP, 32, dynamic=False, powers=True), mx)
    assert rules.scheme_of("lm_head") is None and rules.scheme_of("model.layers.3.mlp.gate") is None
    fp8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    table = {"weight": fp8, "input_tensors": fp8, "output_tensors": None, "bias": None}
    own = read({**QUARK, "layer_quant_config": {"*self_attn*": table}})
    scheme = own.scheme_of("model.layers.0.self_attn.q_proj")
    assert (
        scheme is not None
        and scheme.weight.per == TENSOR
        and own.scheme_of("model.layers.0.mlp.up_proj") == rules.default
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (changed(FP8, "format", "marlin-24"), "'format' is 'marlin-24'"),
        (changed(FP8, "sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config: 'format'"),
        (changed(FP8, "transform_config", {"config_groups": {}}), "'transform_config' is"),
        (changed(FP8, "config_groups/group_0/weights/strategy", "tensor_group"), "'strategy' is 'tensor_group'"),
        (changed(FP8, "config_groups/group_0/weights", None), "'weights' is missing"),
        (changed(FP8, "config_groups/group_0/output_activations", FP8_NUMBERS), "'output_activations' is"),
        (changed(INT8, "config_groups/group_0/input_activations/dynamic", False), "static .* is not supported"),
        (changed(FP8, "config_groups/group_0/weights/rotated", 1), "'rotated' is not known"),
        (changed(FP8, "config_groups/group_0/input_activations/dynamic", "local"), "'dynamic' is 'local'"),
        (changed(INT4, "config_groups/group_0/weights/num_bits", 3), "int3 per group of 32.* is not supported"),
        (changed(QUARK, "global_quant_config", None), "'global_quant_config' is missing"),
        (changed(QUARK, "global_quant_config/weight", [QUARK_MX, QUARK_MX]), "'weight' is .* expected dict"),
        (changed(QUARK, "global_quant_config/weight/dtype", "int2"), "'dtype' is 'int2'"),
        (changed(QUARK, "global_quant_config/output_tensors", QUARK_MX), "'output_tensors' is"),
        (changed(QUARK, "export/weight_format", "fake_quantized"), "'weight_format' is 'fake_quantized'"),
        (changed(QUARK_INT4, "export/pack_method", "order"), "'pack_method' is 'order', supported: 'reorder'"),
        (
            changed(QUARK_INT4, "global_quant_config/weight/zero_point_type", "float32"),
            "'zero_point_type' is 'float32'",
        ),
        (changed(QUARK_INT4, "global_quant_config/weight/block_size", [1, 32]), "'block_size' is"),
        (changed(QUARK_INT4, "global_quant_config/input_tensors", QUARK_MX), "int4 .*activations fp4 .* not supported"),
        (changed(QUARK, "global_quant_config/weight/group_size", 16), "fp4 per group of 16.* is not supported"),
    ],
)
def test_what_cannot_be_honoured_stops_with_its_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(settings)
