"""What all files of the folder share: dependent launches, an implementation each, kernels compiled ahead of time."""

import ast
import importlib
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import services.worker.kernels.impl.triton as package
from benchmarks.aot import TARGETS
from services.worker.kernels.impl.triton._launch import has_dependent_launch, needs_gpu, options, release, wait
from services.worker.kernels.registry import Facts, Impl, all_ops

CPU = torch.device("cpu")
FILES = sorted(path for path in Path(package.__path__[0]).glob("*.py") if path.stem != "__init__")
OPS = [path.stem for path in FILES if not path.stem.startswith("_")]


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


def jit_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Functions under @triton.jit, with arguments or without, whatever else decorates them."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def launched() -> set[tuple[str, str]]:
    """(file, kernel) that no other kernel names: so the host launches them."""
    trees = {path.stem: ast.parse(path.read_text()) for path in FILES}
    found = {(file, function.name) for file, tree in trees.items() for function in jit_functions(tree)}
    used = set()
    for file, tree in trees.items():
        places = {name: (file, name) for other, name in found if other == file}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package.__name__):
                source = (node.module or "").rsplit(".", 1)[-1]
                places |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
        # called, or given to a reduction; by its own name or as a module's
        nodes = [node for function in jit_functions(tree) for node in ast.walk(function)]
        used |= {places[node.id] for node in nodes if isinstance(node, ast.Name) and node.id in places}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used.add((places.get(node.value.id, ("", ""))[1], node.attr))
    return found - used


@pytest.mark.parametrize("name", OPS)
def test_an_implementation_is_of_the_op_that_its_file_names(name: str) -> None:
    module = importlib.import_module(f"{package.__name__}.{name}")
    assert isinstance(module.IMPL, Impl) and module.IMPL.op is all_ops()[name] and module.IMPL.provider == "triton"


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_cases_of_a_file_have_their_own_names(name: str) -> None:
    cases = getattr(importlib.import_module(f"{package.__name__}.{name}"), "AOT", ())
    names = sorted((case.name, target) for case in cases for target in case.targets or TARGETS)
    assert sorted(set(names)) == names


def test_every_launched_kernel_is_compiled_ahead_of_time() -> None:
    modules = [importlib.import_module(f"{package.__name__}.{path.stem}") for path in FILES]
    kernels = {case.kernel.fn for module in modules for case in getattr(module, "AOT", ())}
    compiled = {(kernel.__module__.rsplit(".", 1)[-1], kernel.__name__) for kernel in kernels}
    assert launched() and sorted(launched() - compiled) == []
