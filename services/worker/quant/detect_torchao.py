"""torchao's `quantization_config`: objects of its library as tables of `_type`, `_version` and `_data`, and the names
of its tensors in safetensors files (torchao 0.15 and later: `q_proj._weight_qdata`).
"""

import re
from collections.abc import Callable

from common.errors import ConfigError
from services.worker.quant.rules import Rule, Rules, Settings
from services.worker.quant.scheme import BLOCK, GROUP, ROW, TENSOR, Numbers, Scheme

NAMES, PACKED = "torchao", "torchao-packed"
SECOND = 2  # version of all configurations that are read: the first ones were written as pickles
LEAST_GROUP = 16
FP8 = "float8_e4m3fn"
# How torchao multiplies, or how it found the numbers: nothing of what they mean depends on it.
HARMLESS = ("set_inductor_config", "mm_config", "kernel_preference", "alg_id")
INT4_HARMLESS = ("int4_choose_qparams_algorithm", "int4_tile_packed_ntile")
INTX_HARMLESS = ("intx_choose_qparams_algorithm", "scale_dtype", "weight_scale_dtype")


def read_torchao(settings: Settings) -> Rules:
    """One object for all modules (`default`), which may be a table of objects by name (FqnToConfig).

    Modules that were left out are told by the names of their tensors; what the list of them means differs by version.
    """
    kinds = settings.table("quant_type")
    whole = None if kinds is None else kinds.table("default")
    if kinds is None or whole is None:
        raise ConfigError(f"{settings.where}: 'quant_type' has no 'default'")
    kinds.finish()
    settings.finish("modules_to_not_convert", "include_input_output_embeddings", "untie_embedding_weights")
    if whole.get(str, "_type") not in ("FqnToConfig", "ModuleFqnToConfig"):
        return Rules("torchao", _scheme(whole))
    default, rules = _by_name(whole)
    return Rules("torchao", default, rules)


def _by_name(table: Settings) -> tuple[Scheme | None, list[Rule]]:
    """Whole names come before patterns. The older name of the table repeats the newer one."""
    objects = _opened(table)
    tables = {key: objects.tables_or_none(key) for key in ("fqn_to_config", "module_fqn_to_config")}
    objects.finish()
    schemes = {
        name: None if one is None else _scheme(one)
        for name, one in (tables["fqn_to_config"] or tables["module_fqn_to_config"]).items()
    }
    default = schemes.pop("_default", None)
    whole = [Rule(re.escape(name), "weight", scheme) for name, scheme in schemes.items() if not name.startswith("re:")]
    patterns = [(name[3:], scheme) for name, scheme in schemes.items() if name.startswith("re:")]
    for pattern, _ in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{table.where}: {pattern!r} is no regular expression") from error
    return default, whole + [Rule(pattern, "weight", scheme) for pattern, scheme in patterns]


def _scheme(table: Settings) -> Scheme:
    table.require("_type", *READERS)
    kind = table.get(str, "_type")
    table.require("_version", SECOND)
    return READERS[kind](_opened(table))


def _opened(table: Settings) -> Settings:
    """The object's own fields."""
    fields = Settings(table.get(dict, "_data", {}), f"{table.where}._data")
    table.get(str, "_type")
    table.finish("_version")
    return fields


def _int8(fields: Settings) -> Scheme:
    fields.require("group_size")
    weight = _numbers("int8", fields.table("granularity"), fields.where)
    fields.finish(*HARMLESS)
    return Scheme(NAMES, weight)


def _int8_both(fields: Settings) -> Scheme:
    inputs, weights = _pair(fields)
    symmetric = _word(fields, "act_mapping_type") == "SYMMETRIC"
    fields.require("weight_only_decode", False)
    fields.require("reduce_range", False)
    fields.finish(*HARMLESS)
    return Scheme(NAMES, _numbers("int8", weights, fields.where), _numbers("int8", inputs, fields.where, symmetric))


def _fp8(fields: Settings) -> Scheme:
    _word(fields, "weight_dtype", FP8)
    weight = _numbers("fp8", fields.table("granularity"), fields.where)
    fields.finish(*HARMLESS)
    return Scheme(NAMES, weight)


def _fp8_both(fields: Settings) -> Scheme:
    inputs, weights = _pair(fields)
    _word(fields, "weight_dtype", FP8)
    _word(fields, "activation_dtype", FP8)
    _word(fields, "packing_format", "PLAIN")
    fields.require("activation_value_lb")
    fields.require("activation_value_ub")
    fields.finish(*HARMLESS)
    return Scheme(NAMES, _numbers("fp8", weights, fields.where), _numbers("fp8", inputs, fields.where))


def _int4(fields: Settings) -> Scheme:
    """Two numbers to a byte. Other packings are layouts for the kernels of one GPU."""
    group = _group(fields)
    _word(fields, "int4_packing_format", "PLAIN")
    fields.finish(*HARMLESS, *INT4_HARMLESS)
    return Scheme(PACKED, Numbers("int4", GROUP, group, symmetric=False))


def _intx(fields: Settings) -> Scheme:
    return Scheme(NAMES, _intx_numbers(fields, ""))


def _int8_intx(fields: Settings) -> Scheme:
    symmetric = _word(fields, "act_mapping_type") == "SYMMETRIC"
    return Scheme(NAMES, _intx_numbers(fields, "weight_"), Numbers("int8", ROW, symmetric=symmetric))


def _intx_numbers(fields: Settings, prefix: str) -> Numbers:
    """Of the weight; all other fields are done with. `prefix`: of keys, where activations have such, too."""
    weight = _numbers(
        _word(fields, "weight_dtype"),
        fields.table(f"{prefix}granularity"),
        fields.where,
        _word(fields, f"{prefix}mapping_type").startswith("SYMMETRIC"),
    )
    _word(fields, "intx_packing_format", "UNPACKED_TO_INT8")
    fields.finish(*INTX_HARMLESS)
    return weight


READERS: dict[str, Callable[[Settings], Scheme]] = {
    "Float8DynamicActivationFloat8WeightConfig": _fp8_both,
    "Float8WeightOnlyConfig": _fp8,
    "Int4WeightOnlyConfig": _int4,
    "Int8DynamicActivationInt8WeightConfig": _int8_both,
    "Int8DynamicActivationIntxWeightConfig": _int8_intx,
    "Int8WeightOnlyConfig": _int8,
    "IntxWeightOnlyConfig": _intx,
}


def _word(fields: Settings, key: str, *allowed: str) -> str:
    """Of an enumeration or a dtype, which are tables of `_type` and `_data`."""
    table = fields.table(key)
    if table is None:
        raise ConfigError(f"{fields.where}: {key!r} is missing")
    word = table.get(str, "_data")
    if allowed and word not in allowed:
        raise ConfigError(f"{fields.where}: {key!r} is {word!r}, supported: {', '.join(map(repr, allowed))}")
    return word


def _pair(fields: Settings) -> tuple[Settings, Settings]:
    """What shares a scale, of activations and of weights: one table for both, or two."""
    found = fields.get(object, "granularity")
    both = found if isinstance(found, list) else [found, found]
    tables = [Settings(one, f"{fields.where}.granularity") for one in both if isinstance(one, dict)]
    if not len(both) == len(tables) == 2:
        raise ConfigError(f"{fields.where}: 'granularity' is {found!r}, expected one table or two")
    return tables[0], tables[1]


def _numbers(kind: str, granularity: Settings | None, where: str, symmetric: bool = True) -> Numbers:
    if granularity is None:
        raise ConfigError(f"{where}: 'granularity' is missing")
    granularity.require("_type", "PerTensor", "PerRow", "PerAxis", "PerToken", "PerGroup", "PerBlock")
    shared = granularity.get(str, "_type")
    fields = _opened(granularity)
    per, group = (TENSOR if shared == "PerTensor" else ROW), 0
    if shared == "PerGroup":
        per, group = GROUP, _group(fields)
    elif shared == "PerBlock":
        fields.require("block_size", [128, 128], [1, 128])
        per, group = (BLOCK if fields.get(list, "block_size") == [128, 128] else GROUP), 128
    fields.require("dim", -1, 1)
    fields.require("axis", 0)
    fields.finish()
    return Numbers(kind, per, group, symmetric)


def _group(fields: Settings) -> int:
    group = fields.get(int, "group_size")
    if group < LEAST_GROUP or group % LEAST_GROUP:
        raise ConfigError(f"{fields.where}: 'group_size' is {group}, supported: multiples of {LEAST_GROUP}")
    return group


METHODS = {"torchao": read_torchao}
