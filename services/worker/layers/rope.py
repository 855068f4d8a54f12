"""Rotary tables: frequencies of a checkpoint's RopeSpec, and cos/sin by position. Values only, made at start."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.worker.models.spec import RopeSpec


def frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    """Radians per position, float32 [rotary_dim / 2], and the factor on cos and sin.

    Formulas: Su et al. 2021; linear: Chen et al. 2023; YaRN: Peng et al. 2023; llama3: Llama 3.1's reference code.
    """
    exponent = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    plain = 1.0 / spec.theta**exponent
    scaling = dict(spec.scaling or {})
    if spec.kind == "default":
        return plain, 1.0
    if spec.kind == "linear":
        return plain / scaling["factor"], 1.0
    if spec.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if spec.kind == "yarn":
        return _yarn(plain, scaling, spec)
    raise ValueError(f"rope type {spec.kind!r} is not supported: default, linear, llama3, yarn are")


def _llama3(plain: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between are blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * ((1 - blend) / scaling["factor"] + blend)


def _yarn(plain: Tensor, scaling: Mapping[str, float], spec: RopeSpec) -> tuple[Tensor, float]:
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or spec.max_position

    def dimension(turns: float) -> float:
        return spec.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(scaling.get("beta_fast", 32.0)), dimension(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low or 0.001
    slow = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    return plain / factor * slow + plain * (1 - slow), attention


Rotation = tuple[Tensor, Tensor]  # cos and sin, each [T, 1, R]


class RopeTable:
    """cos and sin of every position, in the form the `rope` op wants, of each of a model's ropes of one width."""

    def __init__(self, specs: Sequence[RopeSpec], max_len: int, like: Tensor) -> None:
        parts = []
        for spec in specs:
            inverse, factor = frequencies(spec)
            angle = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse
            cos, sin = angle.cos() * factor, angle.sin() * factor
            parts += [torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)]
        self._table = torch.stack(parts, 1).to(like)  # [max_len, 2 * ropes, R]

    def at(self, positions: Tensor) -> tuple[Rotation, ...]:
        """positions: int64 [T]; returns each rope's cos and sin."""
        rows = self._table.index_select(0, positions)
        return tuple((rows[:, i : i + 1], rows[:, i + 1 : i + 2]) for i in range(0, rows.shape[1], 2))
