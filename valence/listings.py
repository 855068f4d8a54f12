"""What this build can run on this host, for `valence models`, `kv` and `ops`. Imports torch."""

from typing import Any

import torch

from common.config import Config, Worker
from common.errors import ConfigError
from services.worker.groups import Storage
from services.worker.kernels import registry as kernels
from services.worker.kernels.gpu_arch import arch_of
from services.worker.models import registry as model_files
from services.worker.models import spec as model_spec
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
    try:
        attention = kv_sizes.read(open_model(config.model.source, with_tensors=False).config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return kv_sizes.rows(attention, storage(config).pages.itemsize, eg_latent)


def kept(config: Config) -> list[dict[str, Any]]:
    """What a sequence of this model takes; empty for an architecture without a model file. Raises ConfigError."""
    values = model_spec.Config(open_model(config.model.source, with_tensors=False).config)
    try:
        _, model = model_files.find_model(values.get(list, "architectures", []))
    except ValueError:
        return []
    try:
        return kv_sizes.kept(model.read(values), config.kv.block_tokens, storage(config), config.kv.checkpoint_tokens)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def storage(config: Config) -> Storage:
    """What a GPU would keep."""
    activations = torch.float32 if config.model.dtype == "float32" else torch.bfloat16
    return Storage(torch.float8_e4m3fn if config.kv.dtype == "fp8" else activations, activations)


def ops(settings: Worker) -> list[dict[str, Any]]:
    """One record per op: the provider that a worker with these settings binds here, and why."""
    bindings = kernels.bind(settings.kernels, facts(settings.device))
    return [row._asdict() for row in bindings.table]


def facts(device: str) -> kernels.Facts:
    """What the first device of this kind is."""
    if device == "cpu" or not torch.cuda.is_available():
        return kernels.Facts("cpu")
    return kernels.Facts("cuda", arch_of(torch.device("cuda")), torch.bfloat16)
