"""Which format keeps which weight: the policy behind `model.dtype`. The loader asks it once per parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from common.errors import ConfigError
from services.worker.kernels.ops.grouped_linear import grouped_linear
from services.worker.kernels.ops.moe_tiled import moe_tiled
from services.worker.kernels.ops.norm_linear import norm_linear
from services.worker.kernels.registry import Bindings, Facts, bind
from services.worker.quant.composed import BySizeFormat, TiedWeight
from services.worker.quant.contract import (
    ExpertBiases,
    ExpertFormat,
    ExpertWeights,
    StoredTensor,
    Weight,
    WeightFormat,
)
from services.worker.quant.experts import DenseExpertFormat, TiledExpertFormat
from services.worker.quant.grouped import GroupedFormat
from services.worker.quant.int4 import Int4Format
from services.worker.quant.int8 import Int8Format
from services.worker.quant.none import DenseFormat
from services.worker.quant.packed import PackedBf16Format, PackedFp16Format

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# From how many rows of x on the wide form is faster than the narrow one: measured, docs/adr/0006-cpu-weights.md.
INT4_LIMIT_ROWS = 9
INT8_LIMIT_ROWS = 4
GROUPED4_LIMIT_ROWS = 19
GROUPED8_LIMIT_ROWS = 6

Use = Literal["linear", "embedding", "tied"]  # "tied": embedding and output head at once


@dataclass(frozen=True)
class WeightPolicy:
    """`activation`: dtype of what flows between layers. `linear`: the first that does not refuse keeps the weight."""

    activation: torch.dtype
    device: torch.device
    linear: tuple[WeightFormat, ...]
    table: WeightFormat
    experts: tuple[ExpertFormat, ...] = ()

    def make(self, parts: Sequence[StoredTensor], use: Use = "linear") -> Weight:
        """One parameter. Raises ConfigError when no format can keep it."""
        if use == "embedding":
            return self.table.make(parts)
        reasons = []
        for weight_format in self.linear:
            reason = weight_format.refuses(parts)
            if reason is None:
                weight = weight_format.make(parts)
                # A dense weight serves both uses; other forms are slow to take rows from.
                needs_table = use == "tied" and weight.format_name != self.table.name
                return TiedWeight(self.table.make(parts), weight) if needs_table else weight
            reasons.append(f"{weight_format.name}: {reason}")
        names = ", ".join(part.name for part in parts)
        raise ConfigError(f"no weight format for {names} of {parts[0].source} ({'; '.join(reasons)})")

    def make_experts(
        self,
        gate_up: Sequence[Sequence[StoredTensor]],
        down: Sequence[StoredTensor],
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:
        """One layer's experts (see ExpertFormat). Raises ConfigError when no format can keep them."""
        reasons = []
        for expert_format in self.experts:
            reason = expert_format.refuses(gate_up, down, biases)
            if reason is None:
                return expert_format.make(gate_up, down, biases)
            reasons.append(f"{expert_format.name}: {reason}")
        raise ConfigError(f"no weight format for {down[0].name} of {down[0].source} ({'; '.join(reasons)})")


def activation_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """What flows between layers under `model.dtype`. Raises ConfigError for an unknown name."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ConfigError(f'model.dtype is "{dtype}", supported: auto, {", ".join(DTYPES)}')
    return DTYPES[dtype]


def choose_policy(dtype: str, device: torch.device | None = None, bindings: Bindings | None = None) -> WeightPolicy:
    """`dtype`: "auto" (the fastest that is safe on this machine) or a name in DTYPES; float32 is the exact mode.

    `device`: where weights live, the CPU if None; `bindings`: the ops that weights may use, the torch ones if None.
    Raises ConfigError for another dtype.
    """
    device = device or torch.device("cpu")
    bindings = bindings or bind(("torch",), Facts("cpu"))
    activation = activation_dtype(dtype, device)
    if dtype == "auto" and device.type == "cpu":
        return _fastest_on_cpu(bindings)
    fuses = bindings.provider(norm_linear) != "torch"
    weight_format = DenseFormat(activation, activation, device, bindings if fuses else None)
    experts: tuple[ExpertFormat, ...] = (DenseExpertFormat(activation, device, bindings),)
    if bindings.provider(moe_tiled) != "torch":
        experts = (TiledExpertFormat(activation, device, bindings), *experts)
    return WeightPolicy(activation, device, (weight_format,), weight_format, experts)


def _fastest_on_cpu(bindings: Bindings) -> WeightPolicy:
    """fp32 between layers; weights four bits wide for few rows where the checkpoint has them, else half wide."""
    cpu = torch.device("cpu")
    dense = DenseFormat(torch.float32, torch.float32, cpu)
    halves: list[WeightFormat] = [PackedBf16Format(), PackedFp16Format()]
    wide: list[WeightFormat] = [half for half in halves if half.unavailable() is None][:1]
    many = [*wide, dense][0]
    by_size = [BySizeFormat(Int4Format(), many, INT4_LIMIT_ROWS), BySizeFormat(Int8Format(), many, INT8_LIMIT_ROWS)]
    if bindings.provider(grouped_linear) != "torch":
        few, limits = bindings(grouped_linear), ((4, GROUPED4_LIMIT_ROWS), (8, GROUPED8_LIMIT_ROWS))
        by_size = [BySizeFormat(GroupedFormat(bits, few), many, limit) for bits, limit in limits]
    formats = [form for form in (*by_size, *wide, dense) if form.unavailable() is None]
    # Rows of an embedding are only copied, so bf16 costs no speed; it is the checkpoint's own precision or near it.
    table = DenseFormat(torch.bfloat16, torch.float32, cpu)
    return WeightPolicy(torch.float32, cpu, tuple(formats), table, (DenseExpertFormat(torch.float32, cpu, bindings),))
