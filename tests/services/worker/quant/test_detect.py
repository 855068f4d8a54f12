"""What tools write into config.json, read or refused by the name of the key."""

from typing import Any

import pytest

from common.errors import ConfigError
from services.worker.quant.detect import format_of, read_rules
from services.worker.quant.scheme import ROW, Numbers, Scheme
from tests.services.worker.quant.kinds import GPTQ, KINDS

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ = KINDS["awq"].settings


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_its_format(name: str) -> None:
    rules = read_rules({"quantization_config": KINDS[name].settings}, "config.json")
    assert rules is not None
    scheme = rules.scheme_of("model.layers.0.self_attn.q_proj")
    assert scheme is not None and format_of(scheme, "").name == KINDS[name].form


def test_no_configuration_is_none() -> None:
    assert read_rules({}, "config.json") is None
    assert read_rules({"quantization_config": None}, "config.json") is None


def test_a_part_for_text_may_say_it() -> None:
    rules = read_rules({"text_config": {"quantization_config": FP8}}, "config.json")
    assert rules is not None and rules.method == "fp8"


def test_exceptions_by_name() -> None:
    settings = {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"]}
    rules = read_rules({"quantization_config": settings}, "config.json")
    assert rules is not None and rules.scheme_of("lm_head") is None
    assert rules.scheme_of("model.layers.1.mlp.gate") is None
    assert rules.scheme_of("model.layers.1.mlp.gate_proj") is not None
    dynamic = {**GPTQ, "dynamic": {r"-:.*\.o_proj": {}}}
    rules = read_rules({"quantization_config": dynamic}, "config.json")
    assert rules is not None and rules.scheme_of("model.layers.0.self_attn.o_proj") is None


def test_gpt_oss_tells_by_names() -> None:
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    rules = read_rules({"quantization_config": settings}, "config.json")
    assert rules is not None and rules.schemes == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'quant_method' is 'bitsandbytes', supported: awq"),
        ({**FP8, "fmt": "e5m2"}, "'fmt' is 'e5m2', supported: 'e4m3'"),
        ({**FP8, "weight_block_size": [64, 128]}, r"'weight_block_size' is \[64, 128\]"),
        ({**FP8, "activation_scheme": "static", "weight_block_size": [128, 128]}, "'activation_scheme' is 'static'"),
        ({**FP8, "rotation": "hadamard"}, "'rotation' is not known: 'hadamard'"),
        ({**AWQ, "bits": 3}, "'bits' is 3, supported: 4"),
        ({**AWQ, "version": "gemv"}, "'version' is 'gemv', supported: 'gemm'"),
        ({**AWQ, "zero_point": False}, "'zero_point' is False"),
        ({**AWQ, "group_size": 40}, "'group_size' is 40"),
        ({**GPTQ, "bits": 2}, "'bits' is 2, supported: 4, 8"),
        ({**GPTQ, "bits": 8, "sym": False}, "int8 per group of 64, asymmetric.* is not supported"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "'checkpoint_format' is 'marlin'"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "'dynamic' has"),
        ({**GPTQ, "desc_act": "yes"}, "'desc_act' is 'yes', expected bool"),
    ],
)
def test_what_cannot_be_honoured_stops_with_its_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: quantization_config.*{text}"):
        read_rules({"quantization_config": settings}, "config.json")


def test_a_scheme_that_no_format_takes() -> None:
    with pytest.raises(ConfigError, match=r"^here: weights fp4 per row, activations as they are .* is not supported$"):
        format_of(Scheme("quark", Numbers("fp4", ROW)), "here")
