"""Dependent launches are NVIDIA's: elsewhere nothing of them is left in a kernel or in its launch."""

import torch
import triton
import triton.language as tl

from services.worker.kernels.impl.triton._launch import has_dependent_launch, needs_gpu, options, release, wait
from services.worker.kernels.registry import Facts

CPU = torch.device("cpu")


@triton.jit
def _double(x_ptr, y_ptr, N: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    release(PDL)
    wait(PDL)
    place = tl.arange(0, N)
    tl.store(y_ptr + place, tl.load(x_ptr + place) * 2)


def test_a_kernel_runs_with_the_options_of_its_device(device: torch.device) -> None:
    x = torch.arange(64.0, device=device)
    first, second = torch.empty_like(x), torch.empty_like(x)
    # the second needs what the first writes
    _double[(1,)](x, first, 64, **options(device))
    _double[(1,)](first, second, 64, **options(device))
    assert torch.equal(second, x * 4)


def test_a_cpu_has_no_dependent_launch() -> None:
    assert not has_dependent_launch(CPU) and options(CPU) == {"PDL": False}


def test_a_cpu_is_refused_unless_it_interprets(device: torch.device) -> None:
    assert needs_gpu(Facts("cuda", "sm_90")) is None
    assert needs_gpu(Facts("cpu")) == ("needs a GPU" if device.type == "cuda" else None)
