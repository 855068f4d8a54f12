"""Small checkpoints as torchao 0.18.0 and transformers 5.24 write them to safetensors: names, shapes and dtypes of the
pieces, and the configuration's tables. Held against both once, value by value: docs/quantization.md.
"""

from typing import Any

import torch
from torch import Tensor

from tests.services.worker.quant.coded_checkpoints import Coded, Kind, affine, fp8_block, fp8_channel, fp8_tensor


def _named(values: Tensor, scales: Tensor, zeros: Tensor | None = None) -> dict[str, Tensor]:
    pieces = {"_weight_qdata": values, "_weight_scale": scales}
    return pieces if zeros is None else {**pieces, "_weight_zero_point": zeros}


def fp8_rows(weight: Tensor) -> Coded:
    pieces, wide = fp8_channel(weight)
    return _named(pieces["weight"], pieces["weight_scale"].float()), wide


def fp8_whole(weight: Tensor) -> Coded:
    pieces, wide = fp8_tensor(weight)
    return _named(pieces["weight"], pieces["weight_scale"].view(1, 1)), wide


def fp8_blocks(weight: Tensor) -> Coded:
    pieces, wide = fp8_block(weight)
    return _named(pieces["weight"], pieces["weight_scale_inv"]), wide


def _int8(weight: Tensor, scale: Tensor) -> Coded:
    """scale: [rows, groups] or [1, 1]."""
    groups = weight.view(len(weight), scale.shape[1], -1)
    numbers = (groups / scale[..., None]).round().clamp(-127, 127)
    wide = (numbers * scale[..., None]).view_as(weight)
    return _named(numbers.to(torch.int8).view_as(weight), scale, torch.zeros(scale.shape, dtype=torch.int8)), wide


def int8_rows(weight: Tensor) -> Coded:
    return _int8(weight, weight.abs().amax(1, keepdim=True) / 127)


def int8_groups(weight: Tensor) -> Coded:
    return _int8(weight, weight.view(len(weight), -1, 32).abs().amax(-1) / 127)


def int8_whole(weight: Tensor) -> Coded:
    return _int8(weight, weight.abs().max().view(1, 1) / 127)


def int4_bytes(weight: Tensor) -> Coded:
    """IntxUnpackedToInt8Tensor: a number to a byte, with a sign."""
    made = affine(weight, 32, 4, symmetric=False)
    scales = made.scales.bfloat16()
    numbers, points = (made.numbers - 8).to(torch.int8), (made.zeros - 8).to(torch.int8)
    wide = (made.numbers - made.zeros[:, made.group_of]) * scales.float()[:, made.group_of]
    return _named(numbers, scales, points), wide


def int4_packed(weight: Tensor) -> Coded:
    """Int4Tensor: two signed numbers to a byte, the first one in the lower half; scales and zeros by column."""
    groups = weight.view(len(weight), -1, 32)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).bfloat16()
    zeros = (low + 8 * (high - low) / 15).bfloat16()
    steps = (groups - zeros.float()[..., None]) / scales.float()[..., None]
    numbers = steps.round().clamp(-8, 7)
    wide = (numbers * scales.float()[..., None] + zeros.float()[..., None]).view_as(weight)
    flat = numbers.flatten(1).long()
    packed = (flat[:, ::2] % 16 + 16 * (flat[:, 1::2] % 16)).to(torch.uint8).view(torch.int8)
    return _named(packed, scales.T.contiguous(), zeros.T.contiguous()), wide


def _object(kind: str, version: int = 2, **fields: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": version, "_data": fields}


def _word(kind: str, word: str) -> dict[str, Any]:
    return {"_type": kind, "_data": word}


ROWS, WHOLE = _object("PerRow", 1, dim=-1), _object("PerTensor", 1)
BLOCKS = [_object("PerBlock", 1, block_size=[1, 128]), _object("PerBlock", 1, block_size=[128, 128])]
E4M3, SYMMETRIC = _word("torch.dtype", "float8_e4m3fn"), _word("MappingType", "SYMMETRIC")


def torchao(default: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": default},
        "modules_to_not_convert": None,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def fp8_both(granularity: Any) -> dict[str, Any]:
    return _object(
        "Float8DynamicActivationFloat8WeightConfig",
        activation_dtype=E4M3,
        weight_dtype=E4M3,
        granularity=granularity,
        packing_format=_word("Float8PackingFormat", "PLAIN"),
        mm_config=_object("Float8MMConfig", 1, emulate=False, use_fast_accum=True, pad_inner_dim=False),
        activation_value_lb=None,
        activation_value_ub=None,
        kernel_preference=_word("KernelPreference", "AUTO"),
        set_inductor_config=True,
        alg_id=0,
    )


def int8_both(granularity: Any) -> dict[str, Any]:
    return _object(
        "Int8DynamicActivationInt8WeightConfig",
        act_mapping_type=SYMMETRIC,
        granularity=granularity,
        reduce_range=False,
        set_inductor_config=True,
        weight_only_decode=False,
    )


def int8_weight(granularity: Any) -> dict[str, Any]:
    return _object("Int8WeightOnlyConfig", granularity=granularity, group_size=None, set_inductor_config=True)


FP8_WEIGHT = _object("Float8WeightOnlyConfig", granularity=ROWS, set_inductor_config=True, weight_dtype=E4M3)
INT4 = _object(
    "Int4WeightOnlyConfig",
    group_size=32,
    int4_choose_qparams_algorithm=_word("Int4ChooseQParamsAlgorithm", "TINYGEMM"),
    int4_packing_format=_word("Int4PackingFormat", "PLAIN"),
    int4_tile_packed_ntile=8,
    set_inductor_config=True,
)
INTX = _object(
    "IntxWeightOnlyConfig",
    granularity=_object("PerGroup", 1, group_size=32),
    intx_choose_qparams_algorithm=_word("IntxChooseQParamsAlgorithm", "AFFINE"),
    intx_packing_format=_word("IntxPackingFormat", "UNPACKED_TO_INT8"),
    mapping_type=_word("MappingType", "ASYMMETRIC"),
    scale_dtype=None,
    weight_dtype=_word("torch.dtype", "int4"),
)
TORCHAO_KINDS: dict[str, Kind] = {
    "torchao_fp8": Kind(fp8_rows, torchao(FP8_WEIGHT), "fp8_weight", exact=True, experts=False),
    "torchao_fp8_rows": Kind(fp8_rows, torchao(fp8_both([ROWS, ROWS])), "fp8"),
    "torchao_fp8_tensor": Kind(fp8_whole, torchao(fp8_both([WHOLE, WHOLE])), "fp8"),
    "torchao_fp8_block": Kind(fp8_blocks, torchao(fp8_both(BLOCKS)), "fp8_block"),
    "torchao_int8": Kind(int8_rows, torchao(int8_weight(ROWS)), "int8_weight", exact=True, experts=False),
    "torchao_int8_groups": Kind(
        int8_groups,
        torchao(int8_weight(_object("PerGroup", 1, group_size=32))),
        "int8_weight",
        exact=True,
        experts=False,
    ),
    "torchao_int8_tensor": Kind(int8_whole, torchao(int8_weight(WHOLE)), "int8_weight", exact=True, experts=False),
    "torchao_int8_rows": Kind(int8_rows, torchao(int8_both(ROWS)), "int8"),
    "torchao_int4": Kind(int4_packed, torchao(INT4), "int4", exact=True),
    "torchao_intx": Kind(int4_bytes, torchao(INTX), "int4", exact=True),
}
