"""The `quantization_config` of tools that describe weights and activations of groups of modules: compressed-tensors
(llm-compressor) and Quark."""

from common.errors import ConfigError
from services.worker.quant.rules import Rule, Rules, Settings, named
from services.worker.quant.scheme import BLOCK, GROUP, ROW, TENSOR, Numbers, Scheme

CT_HARMLESS = ("quantization_status", "global_compression_ratio", "version", "kv_cache_scheme", "run_compressed")
CT_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)
CT_PER = {"tensor": TENSOR, "channel": ROW, "token": ROW, "group": GROUP, "block": BLOCK}
CT_TARGETS = ("Linear",)
QUARK_HARMLESS = (
    *("version", "quant_mode", "algo_config", "kv_cache_post_rope", "kv_cache_quant_config", "quant_method"),
    *("export", "layer_type_quant_config"),
)
QUARK_KINDS = {"fp8_e4m3": "fp8", "fp4": "fp4", "int8": "int8", "int4": "int4", "uint4": "int4"}
QUARK_PACKED = ("int4", "uint4")
QUARK_PER = {"per_tensor": TENSOR, "per_channel": ROW, "per_group": GROUP}
MX_GROUP = 32


def read_compressed(settings: Settings) -> Rules:
    """https://github.com/vllm-project/compressed-tensors: groups of targets, each with its own arguments."""
    settings.require("format", *CT_FORMATS)
    settings.empty("transform_config")
    sparsity = settings.table("sparsity_config")
    if sparsity is not None:
        sparsity.require("format", "dense")
    rules = named(settings.names("ignore"))
    # an entry of `ignore` is a whole name, not a part of one
    rules = [Rule(rule.pattern, "glob" if rule.how == "name" else rule.how, None) for rule in rules]
    default: Scheme | None = None
    for group in settings.tables("config_groups").values():
        weights = group.table("weights")
        if weights is None:
            raise ConfigError(f"{group.where}: 'weights' is missing")
        group.empty("output_activations")
        group.require("format", *CT_FORMATS)
        inputs = group.table("input_activations")
        numbers, ordered = _arguments(weights)
        activation = None if inputs is None else _arguments(inputs)[0]
        if activation is not None and numbers.per == BLOCK:
            activation = _by_group(activation)
        scheme = Scheme("compressed-tensors", numbers, activation, ordered)
        for target in group.names("targets"):
            if target in CT_TARGETS:
                default = scheme
            else:
                rules += named([target], "glob", scheme)
        group.finish()
    settings.finish(*CT_HARMLESS)
    return Rules("compressed-tensors", default, rules)


def _by_group(activation: Numbers) -> Numbers:
    """Blocks go with activations in groups as wide as they are, under either name."""
    return Numbers(activation.kind, GROUP, activation.group or 128, activation.symmetric, activation.dynamic)


def _arguments(settings: Settings) -> tuple[Numbers, bool]:
    """Of weights or of activations; whether columns are out of order."""
    bits, kind = settings.get(int, "num_bits"), settings.get(str, "type")
    strategy = settings.get(str, "strategy", "")
    settings.require("strategy", *CT_PER)
    settings.require("actorder", False, "weight", "static", "group", "dynamic")
    settings.require("dynamic", False, True)
    group = settings.get(int, "group_size", 0)
    per = CT_PER[strategy] if strategy else GROUP if group > 0 else TENSOR
    if per == BLOCK:
        settings.require("block_structure", [128, 128], "128x128")
        group = 128
    powers = per == GROUP and kind == "float" and group == MX_GROUP
    found = Numbers(
        f"{'fp' if kind == 'float' else kind}{bits}",
        per,
        group if per in (GROUP, BLOCK) else 0,
        settings.get(bool, "symmetric", True),
        settings.get(bool, "dynamic", False),
        powers,
    )
    ordered = settings.get(object, "actorder", False) in ("group", "dynamic")
    settings.finish("observer", "observer_kwargs", "block_structure", "scale_dtype", "zp_dtype")
    return found, ordered


def read_quark(settings: Settings) -> Rules:
    """https://quark.docs.amd.com: one description for all modules, and others by name."""
    whole = settings.table("global_quant_config")
    if whole is None:
        raise ConfigError(f"{settings.where}: 'global_quant_config' is missing")
    settings.empty("softmax_quant_spec")
    export = settings.table("export")
    if export is not None:
        export.require("weight_format", "real_quantized")
    rules = named(settings.names("exclude"), "glob")
    for pattern, table in settings.tables("layer_quant_config").items():
        rules.append(Rule(pattern, "glob", _quark_scheme(table)))
    found = Rules("quark", _quark_scheme(whole), rules)
    if export is not None and any(scheme.weight.kind == "int4" for scheme in found.schemes):
        export.require("pack_method", "reorder")
    settings.finish(*QUARK_HARMLESS)
    return found


def _quark_scheme(settings: Settings) -> Scheme:
    settings.empty("output_tensors", "bias")
    weight, inputs = settings.table("weight"), settings.table("input_tensors")
    if weight is None:
        raise ConfigError(f"{settings.where}: 'weight' is missing")
    settings.finish("target_device")
    numbers = _quark_numbers(weight)
    stored = weight.get(str, "dtype")
    names = f"quark-{stored}" if stored in QUARK_PACKED else "quark"
    return Scheme(names, numbers, None if inputs is None else _quark_numbers(inputs))


def _quark_numbers(settings: Settings) -> Numbers:
    settings.require("dtype", *QUARK_KINDS)
    settings.require("qscheme", *QUARK_PER)
    settings.require("is_scale_quant", False)
    settings.require("mx_element_dtype")
    settings.require("block_size")
    settings.require("zero_point_type", "int32")
    kind, per = QUARK_KINDS[settings.get(str, "dtype")], QUARK_PER[settings.get(str, "qscheme")]
    powers = settings.get(str, "scale_format", "") == "e8m0"
    settings.require("scale_format", "e8m0", "float32")
    found = Numbers(
        kind,
        ROW if per == ROW else per,
        settings.get(int, "group_size", 0) if per == GROUP else 0,
        settings.get(bool, "symmetric", True),
        settings.get(bool, "is_dynamic", False),
        powers,
    )
    settings.finish(
        *(
            "ch_axis",
            "group_size",
            "observer_cls",
            "round_method",
            "scale_calculation_mode",
            "scale_type",
        ),
        *("enable_buffer_reuse", "qat_spec", "max_input_numel"),
    )
    return found


METHODS = {"compressed-tensors": read_compressed, "quark": read_quark}
