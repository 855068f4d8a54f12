"""What all Triton implementations share: when they can run, dependent launches, and how to compile them off a GPU."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from services.worker.kernels.registry import Facts

Constant = int | float | bool | str | None


class AotCase(NamedTuple):
    """One specialization of a kernel, to be compiled on a host without a GPU.

    `signature`: by parameter name, a type ("*bf16:16" is a pointer, "i32:16" a number divisible by 16, "fp32") or a
    constexpr's value. `hot`: runs in every decode step, so it may not spill registers. `targets`: the only ones that
    use it, if not all do.
    """

    name: str
    kernel: Any
    signature: Mapping[str, Constant]
    num_warps: int = 4
    num_stages: int = 2
    hot: bool = True
    targets: tuple[str, ...] = ()


def needs_gpu(facts: Facts) -> str | None:
    """The refusal that all implementations share."""
    if facts.device == "cuda" or knobs.runtime.interpret:
        return None
    return "needs a GPU"


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it has ended (NVIDIA since compute capability 9)."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@cache
def processors(device: torch.device, interpreted: int = 1) -> int:
    """How many programs run at once, or more of them on each; `interpreted`: what stands for that without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else interpreted


@cache
def options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of every launch: the constexpr PDL, and the launch attribute that goes with it.

    A kernel launched so calls `wait` before it writes, and before it reads what an earlier kernel writes: not before
    weights, nor what is older than a pass's `embedding`, which starts no kernel before all ahead of it has ended.
    """
    return {"PDL": True, "launch_pdl": True} if has_dependent_launch(device) else {"PDL": False}


@triton.jit
def wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Until all kernels ahead have ended and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next kernel may be launched; it still waits for this one's end before it reads."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
