"""Which small checkpoints there are: the tools' configurations, and how each codes a matrix (coded_checkpoints.py)."""

from typing import Any

from tests.services.worker.quant.coded_checkpoints import (
    Kind,
    awq,
    compressed_asymmetric,
    compressed_int4,
    fp8_block,
    fp8_channel,
    fp8_static,
    fp8_tensor,
    gptq,
    gptq_asymmetric,
    gptq_eight,
    gptq_ordered,
    int8_channel,
    mxfp4,
    mxfp4_packed,
    mxfp8,
    quark_rows,
    quark_signed,
    quark_unsigned,
)
from tests.services.worker.quant.torchao_checkpoints import TORCHAO_KINDS


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    common = {"actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}, "symmetric": True}
    group = {
        "weights": {**common, "dynamic": False, "group_size": None, **weights},
        "input_activations": None if inputs is None else {**common, "group_size": None, **inputs},
        "output_activations": None,
        "targets": ["Linear"],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


FP8_NUMBERS, INT8_NUMBERS = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
FP8_TOKEN = {**FP8_NUMBERS, "dynamic": True, "strategy": "token"}
QUARK_MX = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_format": "e8m0",
    "ch_axis": -1,
    "is_dynamic": False,
    "observer_cls": "PerBlockMXObserver",
    "round_method": "half_even",
    "scale_calculation_mode": "even",
    "symmetric": None,
}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": QUARK_MX,
        "input_tensors": {**QUARK_MX, "is_dynamic": True},
        "output_tensors": None,
        "bias": None,
        "target_device": None,
    },
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "exclude": ["lm_head", "*mlp.gate"],
    "export": {"weight_format": "real_quantized", "pack_method": "reorder", "kv_cache_group": []},
    "kv_cache_quant_config": {},
    "algo_config": None,
    "quant_mode": "eager_mode",
    "version": "0.9",
}


def quark_int4(dtype: str, **fields: Any) -> dict[str, Any]:
    """As quark 0.13 writes it."""
    weight = {
        "block_size": None,
        "ch_axis": -1,
        "dtype": dtype,
        "enable_buffer_reuse": False,
        "group_size": 32,
        "is_dynamic": False,
        "is_scale_quant": False,
        "max_input_numel": 4194304,
        "mx_element_dtype": None,
        "observer_cls": "PerGroupMinMaxObserver",
        "qscheme": "per_group",
        "round_method": "half_even",
        "scale_calculation_mode": None,
        "scale_format": None,
        "scale_type": "float",
        "zero_point_type": "int32",
        "symmetric": dtype == "int4",
        **fields,
    }
    whole = {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None, "target_device": None}
    return {**QUARK, "global_quant_config": whole, "kv_cache_post_rope": False, "softmax_quant_spec": None}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True, "damp_percent": 0.01}


KINDS: dict[str, Kind] = {
    "autofp8_static": Kind(
        fp8_static, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, "fp8"
    ),
    "fp8_dynamic": Kind(fp8_tensor, {"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
    "compressed_fp8": Kind(
        fp8_channel, _compressed("float-quantized", {**FP8_NUMBERS, "strategy": "channel"}, FP8_TOKEN), "fp8"
    ),
    "fbgemm": Kind(
        fp8_channel,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head", "gate"]},
        "fp8",
    ),
    "deepseek": Kind(
        fp8_block,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "fp8_block",
    ),
    "compressed_int8": Kind(
        int8_channel,
        _compressed(
            "int-quantized",
            {**INT8_NUMBERS, "strategy": "channel"},
            {**INT8_NUMBERS, "dynamic": True, "strategy": "token"},
        ),
        "int8",
    ),
    "quark_mxfp4": Kind(mxfp4, QUARK, "mxfp4", exact=True),
    "quark_int4": Kind(quark_signed, quark_int4("int4"), "int4", exact=True),
    "quark_uint4": Kind(quark_unsigned, quark_int4("uint4"), "int4", exact=True),
    "quark_int4_rows": Kind(
        quark_rows, quark_int4("int4", qscheme="per_channel", ch_axis=0, group_size=None), "int4", exact=True
    ),
    "compressed_mxfp4": Kind(
        mxfp4_packed,
        _compressed(
            "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, None
        ),
        "mxfp4",
        exact=True,
    ),
    "compressed_mxfp8": Kind(
        mxfp8,
        _compressed(
            "mxfp8-quantized",
            {**FP8_NUMBERS, "strategy": "group", "group_size": 32},
            {**FP8_NUMBERS, "dynamic": True, "strategy": "group", "group_size": 32},
        ),
        "mxfp8",
    ),
    "awq": Kind(
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        "int4",
        exact=True,
    ),
    "gptq": Kind(gptq, GPTQ, "int4", exact=True),
    "gptq_v2": Kind(gptq_asymmetric, {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, "int4", exact=True),
    "gptq_ordered": Kind(gptq_ordered, {**GPTQ, "desc_act": True}, "int4", exact=True, experts=False),
    "gptq_eight": Kind(gptq_eight, {**GPTQ, "bits": 8}, "int8_weight", exact=True, experts=False),
    "compressed_int4": Kind(
        compressed_int4,
        _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None),
        "int4",
        exact=True,
    ),
    "compressed_asymmetric": Kind(
        compressed_asymmetric,
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False},
            None,
        ),
        "int4",
        exact=True,
    ),
    **TORCHAO_KINDS,
}
