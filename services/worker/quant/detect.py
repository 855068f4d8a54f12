"""What a checkpoint says about its own numbers: the `quantization_config` of the tools that code all matrices alike.

`read_rules` is what the engine calls. Tools with groups of unlike modules: detect_groups.py.
"""

import re
from collections.abc import Mapping

from common.errors import ConfigError
from services.worker.quant.catalog import all_formats, all_readers
from services.worker.quant.coded import CodedFormat
from services.worker.quant.rules import Rule, Rules, Settings, named
from services.worker.quant.scheme import BLOCK, GROUP, ROW, TENSOR, Numbers, Scheme

KEYS = ("quantization_config", "compression_config")
BLOCK_SIZE = [128, 128]
# Of the tool that made the checkpoint, or of the library that runs it: nothing of the numbers depends on them.
GPTQ_HARMLESS = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path", "meta", "mse"),
    *("model_file_base_name", "batch_size", "block_name_to_quantize", "cache_block_outputs", "dataset", "tokenizer"),
    *("max_input_length", "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize"),
    *("pad_token_id", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "uri", "act_group_aware"),
    *("lm_head", "backend", "quantizer", "is_marlin_format"),
)
AWQ_HARMLESS = ("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")


def read_rules(config: Mapping[str, object], where: str) -> Rules | None:
    """Of config.json's content; None where it says nothing. Raises ConfigError for what cannot be honoured, by name."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in KEYS:
            values = place.get(key)
            if isinstance(values, dict) and values:
                return _read(values, f"{where}: {key}")
    return None


def _read(values: Mapping[str, object], where: str) -> Rules:
    settings = Settings(values, where)
    method = settings.get(str, "quant_method", "compressed-tensors" if "config_groups" in values else "")
    reader = all_readers().get(method)
    if reader is None:
        known = ", ".join(sorted(all_readers()))
        raise ConfigError(f"{where}: 'quant_method' is {method!r}, supported: {known}")
    rules = reader(settings)
    for scheme in rules.schemes:
        format_of(scheme, where)
    return rules


def format_of(scheme: Scheme, where: str) -> CodedFormat:
    """Raises ConfigError where no format takes it."""
    for form in all_formats().values():
        if form.takes(scheme):
            return form
    raise ConfigError(f"{where}: {scheme} is not supported")


def read_fp8(settings: Settings) -> Rules:
    """transformers', DeepSeek's and AutoFP8's: blocks of 128 by 128, or one scale for a matrix."""
    settings.require("fmt", "e4m3")
    settings.require("scale_fmt", "ue8m0", "float")
    settings.require("activation_scheme", "dynamic", "static")
    dynamic = settings.get(str, "activation_scheme", "dynamic") == "dynamic"
    settings.require("weight_block_size", BLOCK_SIZE)
    if settings.get(list, "weight_block_size", []):
        settings.require("activation_scheme", "dynamic")
        scheme = Scheme("fp8", Numbers("fp8", BLOCK, 128), Numbers("fp8", GROUP, 128))
    else:
        scheme = Scheme("fp8", Numbers("fp8", TENSOR), Numbers("fp8", TENSOR, dynamic=dynamic))
    left = [*settings.names("modules_to_not_convert"), *settings.names("ignored_layers")]
    settings.finish("dequantize", "kv_cache_scheme", "kv_cache_quant_targets")
    return Rules("fp8", scheme, named(left))


def read_fbgemm(settings: Settings) -> Rules:
    """A bound of activations (activation_scale_ub) is not applied: what exceeds it is not saturated."""
    left = settings.names("modules_to_not_convert")
    settings.finish("activation_scale_ub")
    return Rules("fbgemm_fp8", Scheme("fbgemm", Numbers("fp8", ROW), Numbers("fp8", ROW)), named(left))


def read_awq(settings: Settings) -> Rules:
    settings.require("bits", 4)
    settings.require("zero_point", True)
    version = settings.get(str, "version", "gemm").lower()
    if version != "gemm":
        raise ConfigError(f"{settings.where}: 'version' is {version!r}, supported: 'gemm'")
    weight = _grouped("int4", settings, symmetric=False)
    left = settings.names("modules_to_not_convert")
    settings.finish(*AWQ_HARMLESS)
    return Rules("awq", Scheme("awq", weight), named(left, "within"))


def read_gptq(settings: Settings) -> Rules:
    settings.require("bits", 4, 8)
    settings.require("pack_dtype", "int32")
    for key in ("checkpoint_format", "format"):
        settings.require(key, "gptq", "gptq_v2")
    less_one = "gptq_v2" not in (settings.get(str, "checkpoint_format", "gptq"), settings.get(str, "format", "gptq"))
    kind, ordered = f"int{settings.get(int, 'bits')}", settings.get(bool, "desc_act", False)
    weight = _grouped(kind, settings, symmetric=settings.get(bool, "sym", True))
    scheme = Scheme("gptq", weight, ordered=ordered, zeros_less_one=less_one)
    rules = []
    for pattern, changes in settings.get(dict, "dynamic", {}).items():
        sign, _, name = str(pattern).partition(":")
        if sign not in ("-", "+") or (sign == "+" and changes):
            raise ConfigError(f"{settings.where}: 'dynamic' has {pattern!r}: {changes!r}; supported: '-:' exceptions")
        rules.append(Rule(_compiled(name, settings.where), "regex", None if sign == "-" else scheme))
    settings.finish(*GPTQ_HARMLESS)
    return Rules("gptq", scheme, rules)


def _compiled(pattern: str, where: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{where}: {pattern!r} is no regular expression") from error
    return pattern


def read_mxfp4(settings: Settings) -> Rules:
    """gpt-oss: only its stacks of experts are coded, which their names tell."""
    settings.names("modules_to_not_convert")
    settings.finish("dequantize")
    return Rules("mxfp4")


def _grouped(kind: str, settings: Settings, symmetric: bool) -> Numbers:
    group = settings.get(int, "group_size")
    if group == -1:
        return Numbers(kind, ROW, symmetric=symmetric)
    if group < 16 or group % 16:
        raise ConfigError(f"{settings.where}: 'group_size' is {group}, supported: -1 and multiples of 16")
    return Numbers(kind, GROUP, group, symmetric)


METHODS = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm,
    "awq": read_awq,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}
