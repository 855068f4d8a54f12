"""What no file of the folder may lack: an implementation, its own test, and its kernels compiled ahead of time."""

import ast
import importlib
from pathlib import Path

import pytest

import services.worker.kernels.impl.triton as package
from benchmarks.aot import TARGETS
from services.worker.kernels.registry import Impl, all_ops

FILES = sorted(path for path in Path(package.__path__[0]).glob("*.py") if path.stem != "__init__")
OPS = [path.stem for path in FILES if not path.stem.startswith("_")]


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
        # called, or given to a reduction
        names = {n.id for function in jit_functions(tree) for n in ast.walk(function) if isinstance(n, ast.Name)}
        used |= {places[name] for name in names & places.keys()}
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


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_its_test(name: str) -> None:
    assert (Path(__file__).parent / f"test_{name}.py").exists()


def test_every_launched_kernel_is_compiled_ahead_of_time() -> None:
    modules = [importlib.import_module(f"{package.__name__}.{path.stem}") for path in FILES]
    kernels = {case.kernel.fn for module in modules for case in getattr(module, "AOT", ())}
    compiled = {(kernel.__module__.rsplit(".", 1)[-1], kernel.__name__) for kernel in kernels}
    assert launched() and sorted(launched() - compiled) == []
