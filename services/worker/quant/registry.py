"""Which format keeps which weight: the policy behind `model.dtype`. The loader asks it once per parameter."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.errors import ConfigError
from services.worker.quant.contract import StoredTensor, Weight, WeightFormat
from services.worker.quant.none import DenseFormat

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class WeightPolicy:
    """`activation`: dtype of what flows between layers. `formats`: the first that does not refuse keeps the weight."""

    activation: torch.dtype
    formats: tuple[WeightFormat, ...]

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        reasons = []
        for weight_format in self.formats:
            reason = weight_format.refuses(parts)
            if reason is None:
                return weight_format.make(parts, self.activation)
            reasons.append(f"{weight_format.name}: {reason}")
        names = ", ".join(part.name for part in parts)
        raise ConfigError(f"no weight format for {names} of {parts[0].source} ({'; '.join(reasons)})")


def choose_policy(dtype: str) -> WeightPolicy:
    """`dtype`: "auto" (the fastest that is safe on this machine) or a name in DTYPES; float32 is the exact mode."""
    if dtype == "auto":
        return WeightPolicy(torch.float32, (DenseFormat(),))
    if dtype not in DTYPES:
        raise ConfigError(f'model.dtype is "{dtype}", supported: auto, {", ".join(DTYPES)}')
    return WeightPolicy(DTYPES[dtype], (DenseFormat(),))
