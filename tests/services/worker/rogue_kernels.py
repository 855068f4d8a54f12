"""A provider of kernels that fault, hang, give NaN or are wrong, in place of Triton's; as a child process, its
self-test.

`python rogue_kernels.py NAMES FD`: as services/worker/self_test_child.py, where the ops NAMES (`op=how`, by commas) are
implemented so; without `=how` an op is right. `import=how` is about the import of the provider.
"""

import ctypes
import inspect
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from services.worker import self_test_child
from services.worker.kernels import registry
from services.worker.kernels.outcome import convert
from services.worker.kernels.registry import Facts, Impl, all_ops


def fault() -> None:
    ctypes.string_at(0)


def hang() -> None:
    while True:
        time.sleep(3600)


def leave() -> None:
    print("amdgpu: Memory access fault by GPU node-1 on address 0x7f", flush=True)
    os._exit(134)


def refuse() -> None:
    raise RuntimeError("This GEMM is not supported!\nby anybody")


HOW = {"faults": fault, "hangs": hang, "leaves": leave, "raises": refuse}


def spoiled(run: Callable[..., Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return convert(run(*arguments), lambda tensor: change(tensor) if tensor.is_floating_point() else tensor + 1)

    return call


def nan_at_one(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[:1] = torch.nan
    return tensor


def made(name: str, how: str) -> Impl[Any]:
    op = all_ops()[name]

    def misbehave(*arguments: Any) -> Any:
        HOW[how]()

    def right(*arguments: Any) -> Any:
        return op.meaning(*arguments)

    def meddle(*arguments: Any) -> Any:
        """Right, but it changes an argument that is not its own."""
        result = op.meaning(*arguments)
        arguments[1].view(-1)[:1].add_(1)
        return result

    runs: dict[str, Callable[..., Any]] = {
        "": right,
        "wrong": spoiled(op.meaning, lambda tensor: tensor * 1.3 + 0.1),
        "nan": spoiled(op.meaning, nan_at_one),
        "meddles": meddle,
    }
    run = runs.get(how, misbehave)
    run.__signature__ = inspect.signature(op.meaning)  # type: ignore[attr-defined]
    return Impl(op, "triton", run)


def rogues(text: str) -> Callable[[Facts, str], tuple[dict[str, Impl[Any]], str]]:
    """A registry's find_for."""
    named = dict(pair.partition("=")[::2] for pair in text.split(","))
    original = registry.find_for

    def find(facts: Facts, provider: str) -> tuple[dict[str, Impl[Any]], str]:
        if provider != "triton":
            return original(facts, provider)
        if how := named.get("import"):
            HOW[how]()
        return {name: made(name, how) for name, how in named.items() if name != "import"}, ""

    return find


if __name__ == "__main__":
    registry.find_for = rogues(sys.argv.pop(1))
    self_test_child.main()
