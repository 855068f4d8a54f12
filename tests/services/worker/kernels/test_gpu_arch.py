"""One answer, whatever the build of torch."""

from types import SimpleNamespace

import pytest
import torch

from services.worker.kernels.gpu_arch import arch_of


def test_a_cpu_has_no_architecture() -> None:
    assert arch_of(torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("hip", "name", "wanted"),
    [("7.2", "gfx942:sramecc+:xnack-", "gfx942"), ("7.2", "gfx950", "gfx950"), (None, "NVIDIA H200", "sm_90")],
)
def test_gpus_are_named_by_their_architecture(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, name: str, wanted: str
) -> None:
    """torch's build for NVIDIA has the field of AMD's architecture, too: with the product's name in it."""
    monkeypatch.setattr(torch.version, "hip", hip)
    properties = SimpleNamespace(gcnArchName=name, name=name, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert arch_of(torch.device("cuda", 0)) == wanted
