"""Small checkpoints with coded weights, written by us as each tool does, and what the numbers in them mean.

Encoders here are of their own, number by number where tools pack, so that nothing of services/worker/quant is held
against itself. Packing, names and configurations were compared once with those of the tools: docs/quantization.md.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker.loader import expected_shapes
from services.worker.models.registry import find_model
from services.worker.models.spec import Config

Coded = tuple[dict[str, Tensor], Tensor]  # pieces by suffix, and the float32 matrix that they mean
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
DENSE = {**COMMON, "architectures": ["LlamaForCausalLM"], "intermediate_size": 256}
MOE = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LEFT = ("embed_tokens", "lm_head", "mlp.gate.")


def random_tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor of the model, float32."""
    _, model = find_model(list(config["architectures"]))
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in expected_shapes(model.read(Config(config)), model.names).items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = values / shape[-1] ** 0.5 if len(shape) == 2 else 1 + values / 8
    return tensors


def is_coded(name: str, values: Tensor) -> bool:
    return values.dim() == 2 and not any(part in name for part in LEFT)


def _rounded8(scaled: Tensor) -> Tensor:
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_tensor(weight: Tensor) -> Coded:
    scale = weight.abs().max() / 448
    values = _rounded8(weight / scale)
    return {"weight": values, "weight_scale": scale.clone()}, values.float() * scale


def fp8_static(weight: Tensor) -> Coded:
    pieces, wide = fp8_tensor(weight)
    return {**pieces, "input_scale": torch.tensor(0.02)}, wide


def fp8_channel(weight: Tensor) -> Coded:
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    values = _rounded8(weight / scale.float())
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def fp8_block(weight: Tensor) -> Coded:
    rows, columns = weight.shape
    values, wide = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
            scales[i, j] = weight[place].abs().max() / 448
            values[place] = _rounded8(weight[place] / scales[i, j])
            wide[place] = values[place].float() * scales[i, j]
    return {"weight": values, "weight_scale_inv": scales}, wide


def int8_channel(weight: Tensor) -> Coded:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def _exponents(groups: Tensor, emax: int) -> Tensor:
    """Of powers of two by OCP's rule: of the largest number, less the format's largest exponent."""
    return torch.floor(torch.log2(groups.abs().amax(-1))) - emax


def mxfp4(weight: Tensor, name: str = "weight") -> Coded:
    groups = weight.view(len(weight), -1, 32)
    exponents = _exponents(groups, 2)
    scaled = groups / 2.0 ** exponents[..., None]
    codes = (scaled[..., None] - E2M1).abs().argmin(-1).flatten(1)
    wide = (E2M1[codes].view_as(groups) * 2.0 ** exponents[..., None]).view_as(weight)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return {name: packed, "weight_scale": (exponents + 127).to(torch.uint8)}, wide


def mxfp4_packed(weight: Tensor) -> Coded:
    return mxfp4(weight, "weight_packed")


def mxfp8(weight: Tensor) -> Coded:
    groups = weight.view(len(weight), -1, 32)
    exponents = _exponents(groups, 8)
    values = _rounded8(groups / 2.0 ** exponents[..., None])
    wide = (values.float() * 2.0 ** exponents[..., None]).view_as(weight)
    return {"weight": values.view_as(weight), "weight_scale": (exponents + 127).to(torch.uint8)}, wide


@dataclass(frozen=True)
class Affine:
    """Whole numbers in groups: weight = (number - zero) * scale."""

    numbers: Tensor  # int64 [out, in]
    scales: Tensor  # float16 [out, in / group]
    zeros: Tensor  # int64 [out, in / group]
    group_of: Tensor  # int64 [in]

    @property
    def wide(self) -> Tensor:
        scales, zeros = self.scales.float()[:, self.group_of], self.zeros[:, self.group_of]
        return (self.numbers - zeros) * scales


def affine(weight: Tensor, group: int, bits: int, symmetric: bool, shuffled: bool = False) -> Affine:
    columns, top = weight.shape[1], 2**bits - 1
    group_of = torch.arange(columns) // group
    if shuffled:
        group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    scales, zeros = [], []
    for number in range(columns // group):
        part = weight[:, group_of == number]
        if symmetric:
            scales.append(part.abs().amax(1) / (top / 2))
            zeros.append(torch.full((len(weight),), (top + 1) // 2))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales.append((high - low) / top)
            zeros.append((-low / scales[-1]).round().long())
    scale, zero = torch.stack(scales, 1).half(), torch.stack(zeros, 1)
    numbers = (weight / scale.float()[:, group_of]).round().long() + zero[:, group_of]
    return Affine(numbers.clamp(0, top), scale, zero, group_of)


def packed(numbers: Tensor, bits: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[N, K] as int32 [N, K * bits / 32]: number order[i] of each word's in its i-th bits."""
    lanes = 32 // bits
    words = torch.zeros(len(numbers), numbers.shape[1] // lanes, dtype=torch.int64)
    for i in range(lanes):
        words |= numbers[:, order[i] :: lanes].long() << (bits * i)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(weight: Tensor) -> Coded:
    made = affine(weight, 64, 4, symmetric=False)
    pieces = {
        "qweight": packed(made.numbers.T, 4, AWQ_ORDER),
        "qzeros": packed(made.zeros.T, 4, AWQ_ORDER),
        "scales": made.scales.T.contiguous(),
    }
    return pieces, made.wide


def quark_unsigned(weight: Tensor) -> Coded:
    """As quark 0.13 packs "uint4" by group; "int4" has signed numbers and zero points of 0."""
    return _quark(affine(weight, 32, 4, symmetric=False), 0)


def quark_signed(weight: Tensor) -> Coded:
    return _quark(affine(weight, 32, 4, symmetric=True), 8)


def _quark(made: Affine, less: int) -> Coded:
    pieces = {
        "weight": packed((made.numbers - less).T % 16, 4, AWQ_ORDER),
        "weight_scale": made.scales.T.contiguous(),
        "weight_zero_point": packed((made.zeros - less).T % 16, 4, AWQ_ORDER),
    }
    return pieces, made.wide


def quark_rows(weight: Tensor) -> Coded:
    """By row nothing is transposed."""
    made = affine(weight, weight.shape[1], 4, symmetric=True)
    numbers = packed((made.numbers - 8) % 16, 4, AWQ_ORDER)
    zeros = torch.zeros(len(weight) // 8, dtype=torch.int32)
    return {"weight": numbers, "weight_scale": made.scales.view(-1), "weight_zero_point": zeros}, made.wide


def gptq(weight: Tensor, bits: int = 4, symmetric: bool = True, shuffled: bool = False, less: int = 1) -> Coded:
    made = affine(weight, 64, bits, symmetric, shuffled)
    pieces = {
        "qweight": packed(made.numbers, bits).T.contiguous(),
        "qzeros": packed((made.zeros - less).T % 2**bits, bits),
        "scales": made.scales.T.contiguous(),
        "g_idx": made.group_of.to(torch.int32),
    }
    return pieces, made.wide


def gptq_asymmetric(weight: Tensor) -> Coded:
    return gptq(weight, symmetric=False, less=0)


def gptq_ordered(weight: Tensor) -> Coded:
    return gptq(weight, shuffled=True)


def gptq_eight(weight: Tensor) -> Coded:
    return gptq(weight, bits=8)


def compressed_int4(weight: Tensor) -> Coded:
    made = affine(weight, 32, 4, symmetric=True)
    shape = torch.tensor(list(weight.shape))
    return {"weight_packed": packed(made.numbers, 4), "weight_scale": made.scales, "weight_shape": shape}, made.wide


def compressed_asymmetric(weight: Tensor) -> Coded:
    made = affine(weight, 64, 4, symmetric=False)
    points = packed(made.zeros.T, 4).T.contiguous()
    shape = torch.tensor(list(weight.shape))
    pieces = {"weight_packed": packed(made.numbers, 4), "weight_scale": made.scales}
    return {**pieces, "weight_zero_point": points, "weight_shape": shape}, made.wide


@dataclass(frozen=True)
class Kind:
    """`form`: the format that keeps it; `exact`: activations stay as they are."""

    code: Callable[[Tensor], Coded]
    settings: dict[str, Any]
    form: str
    exact: bool = False
    experts: bool = True


def coded(kind: Kind, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The checkpoint's tensors, and the dense ones that they mean."""
    found, meant = {}, {}
    for name, values in tensors.items():
        if not is_coded(name, values):
            found[name] = meant[name] = values
            continue
        pieces, meant[name] = kind.code(values)
        for suffix, piece in pieces.items():
            found[f"{name.removesuffix('.weight')}.{suffix}"] = piece.contiguous()
    return found, meant


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], settings: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    whole = dict(config) if settings is None else {**config, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_pair(folder: Path, config: Mapping[str, Any], kind: Kind) -> tuple[Path, Path]:
    """A coded checkpoint, and its dense twin."""
    found, meant = coded(kind, random_tensors(config))
    return write(folder / "coded", config, found, kind.settings), write(folder / "twin", config, meant)
