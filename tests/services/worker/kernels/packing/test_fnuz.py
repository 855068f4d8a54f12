from types import SimpleNamespace

import pytest
import torch

from services.worker.kernels.packing.fnuz import fp8_of, native_fp8, to_fnuz, to_ocp

OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def test_every_number_of_ocp_is_kept() -> None:
    numbers = torch.arange(256).to(torch.uint8).view(OCP)
    numbers = numbers[~numbers.float().isnan()]
    assert len(numbers) == 254
    scale = torch.tensor([0.37])
    converted, doubled = to_fnuz(numbers, scale)
    assert converted.dtype == FNUZ and not converted.float().isnan().any()
    assert torch.equal(converted.float() * doubled, numbers.float() * scale)
    kept = numbers.view(torch.uint8) != 0x80
    assert torch.equal(converted.view(torch.uint8)[kept], numbers.view(torch.uint8)[kept]), "bytes are kept"
    assert converted.view(torch.uint8)[~kept].tolist() == [0], "and -0, the byte of fnuz's NaN, is 0"


def test_there_and_back() -> None:
    weight = torch.randn(4, 6, 32).to(OCP)
    scale = torch.rand(4, 6, 1)
    back, halved = to_ocp(*to_fnuz(weight, scale))
    assert back.dtype == OCP and torch.equal(back.float(), weight.float()) and torch.equal(halved, scale)


def test_nothing_is_changed_in_place() -> None:
    weight = torch.tensor([-0.0, 1.0]).to(OCP)
    scale = torch.ones(1)
    to_fnuz(weight, scale)
    assert weight.view(torch.uint8).tolist() == [0x80, 0x38] and scale.item() == 1


def test_the_form_follows_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [fp8_of(arch) for arch in ("gfx942", "gfx950", "sm_90", "")] == [FNUZ, OCP, OCP, OCP]
    native_fp8.cache_clear()
    assert native_fp8() == OCP
    for arch, wanted in (("gfx942", FNUZ), ("gfx950", OCP)):
        properties = SimpleNamespace(gcnArchName=f"{arch}:sramecc+:xnack-")
        monkeypatch.setattr(torch.version, "hip", "7.2")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        native_fp8.cache_clear()
        assert native_fp8() == wanted
    native_fp8.cache_clear()
