"""What this build can run on this host, for `valence models`, `kv` and `ops`. Imports torch."""

from typing import Any

import torch

from common.config import Config, Worker
from common.errors import ConfigError
from services.worker.kernels import registry as kernels
from services.worker.kernels.gpu_arch import arch_of
from services.worker.models import registry as model_files
from services.worker.source import open_model
from valence import kv_sizes


def models() -> list[dict[str, Any]]:
    """One record per architecture: its name, its file, what the file supports."""
    return [
        {"architecture": name, "file": found.file, "features": list(found.model.features)}
        for name, found in sorted(model_files.all_models().items())
    ]


def kv(config: Config, eg_latent: int = 0) -> list[dict[str, Any]]:
    """What a token of this model costs, by kind of attention; see kv_sizes.py. Raises ConfigError."""
    values = open_model(config.model.source, with_tensors=False).config
    try:
        attention = kv_sizes.read(values)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    number_bytes = 1 if config.kv.dtype == "fp8" else 4 if config.model.dtype == "float32" else 2
    return kv_sizes.rows(attention, number_bytes, eg_latent)


def ops(settings: Worker) -> list[dict[str, Any]]:
    """One record per op: the provider that a worker with these settings binds here, and why."""
    bindings = kernels.bind(settings.kernels, facts(settings.device))
    return [row._asdict() for row in bindings.table]


def facts(device: str) -> kernels.Facts:
    """What the first device of this kind is."""
    if device == "cpu" or not torch.cuda.is_available():
        return kernels.Facts("cpu")
    return kernels.Facts("cuda", arch_of(torch.device("cuda")), torch.bfloat16)
