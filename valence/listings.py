"""What this build can run on this host, for `valence models` and `valence ops`. Imports torch."""

from typing import Any

import torch

from common.config import Worker
from services.worker.kernels import registry as kernels
from services.worker.kernels.gpu_arch import arch_of
from services.worker.models import registry as model_files


def models() -> list[dict[str, Any]]:
    """One record per architecture: its name, its file, what the file supports."""
    return [
        {"architecture": name, "file": found.file, "features": list(found.model.features)}
        for name, found in sorted(model_files.all_models().items())
    ]


def ops(settings: Worker) -> list[dict[str, Any]]:
    """One record per op: the provider that a worker with these settings binds here, and why."""
    bindings = kernels.bind(settings.kernels, facts(settings.device))
    return [row._asdict() for row in bindings.table]


def facts(device: str) -> kernels.Facts:
    """What the first device of this kind is."""
    if device == "cpu" or not torch.cuda.is_available():
        return kernels.Facts("cpu")
    return kernels.Facts("cuda", arch_of(torch.device("cuda")), torch.bfloat16)
