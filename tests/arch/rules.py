"""The project's size, purity and layering rules as data and one reader of source files.

Callers: tests/arch/test_*.py. A rule that matters is a test; CONTRIBUTING.md lists them for people.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "services", "valence", "benchmarks")


@dataclass(frozen=True)
class Limits:
    file_lines: int
    function_lines: int
    parameters: int
    class_lines: int = 250
    class_attributes: int = 15


ORDINARY = Limits(file_lines=400, function_lines=70, parameters=8)
OP = Limits(file_lines=400, function_lines=70, parameters=10)  # a custom op of torch has no tuples
KERNEL = Limits(file_lines=600, function_lines=200, parameters=10_000)  # under kernels/impl

# (which files, which imports they may not have)
LAYERS = [
    (r"^common/(?!transport)", r"^(zmq|torch|triton|aiter|numba|services)\b"),
    (r"^services/scheduler/(?!process|__main__)", r"^(zmq|asyncio|torch|time|random|transformers)\b"),
    (r"^services/(api|tokenizer|scheduler)/", r"^(torch|triton|aiter|numba)\b"),
    (r"^services/worker/(?!kernels/impl/aiter)", r"^aiter\b"),
    (r"^services/worker/(?!kernels/impl/triton)", r"^triton\b"),
    (r"^services/worker/(?!kernels/impl/numba)", r"^(numba|llvmlite)\b"),
    (r"^services/worker/(models|layers|quant|kernels)/", r"^(zmq|msgspec|asyncio)\b"),
    (r"^services/worker/kernels/", r"^services\.worker\.(models|layers|quant)\b"),
    (r"^services/worker/quant/", r"^services\.worker\.(models|layers)\b"),
    (r"^services/worker/layers/", r"^services\.worker\.models\.(?!spec|caches)"),
    (r"^(services|common)/", r"^valence\b"),
    (r"", r"^(pickle|shelve|marshal|dill|cloudpickle)\b"),
]


def sources(*packages: str) -> Iterator[tuple[str, Path]]:
    for package in packages or PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path


@cache
def parsed(*packages: str) -> list[tuple[str, ast.Module, str]]:
    """(name, tree, text) of each file; read once for all rules."""
    if packages:
        return [entry for entry in parsed() if entry[0].startswith(tuple(f"{package}/" for package in packages))]
    return [(name, ast.parse(text := path.read_text()), text) for name, path in sources()]


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All of a file's, walked once for all rules. No node is added to a tree here, so contexts are left out."""
    return [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context | ast.operator)]


def imports(tree: ast.Module) -> list[str]:
    found = [alias.name for node in nodes(tree) if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def forbidden_imports(name: str, tree: ast.Module) -> list[str]:
    modules = imports(tree)
    own = ".".join(name.split("/")[:2])
    found = []
    if name.startswith("services/"):
        found += [m for m in modules if m.startswith("services.") and not m.startswith(own + ".") and m != own]
    for place, pattern in LAYERS:
        if re.search(place, name):
            found += [module for module in modules if re.search(pattern, module)]
    return [f"{name} imports {module}" for module in found]


def oversized(name: str, tree: ast.Module, text: str) -> list[str]:
    limits = KERNEL if "kernels/impl" in name else OP if "kernels/ops" in name else ORDINARY
    found = []
    if (lines := text.count("\n")) > limits.file_lines:
        found.append(f"{name}: {lines} lines")
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += _oversized_function(name, node, limits)
        elif isinstance(node, ast.ClassDef):
            found += _oversized_class(name, node, limits)
    return found


def _oversized_function(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, limits: Limits) -> list[str]:
    found = []
    if (lines := (node.end_lineno or 0) - node.lineno + 1) > limits.function_lines:
        found.append(f"{name}:{node.lineno} {node.name}() has {lines} lines")
    arguments = [a for a in node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
    # Command line entry points are declarations: one parameter per option.
    if len(arguments) > limits.parameters and not name.startswith("valence/"):
        found.append(f"{name}:{node.lineno} {node.name}() has {len(arguments)} parameters")
    return found


def _oversized_class(name: str, node: ast.ClassDef, limits: Limits) -> list[str]:
    lines = (node.end_lineno or 0) - node.lineno + 1
    attributes = {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }
    if lines > limits.class_lines or len(attributes) > limits.class_attributes:
        return [f"{name}:{node.lineno} class {node.name} has {lines} lines, {len(attributes)} attributes"]
    return []


def impurities(name: str, tree: ast.Module, text: str) -> list[str]:
    found = []
    if name != "common/env.py" and re.search(r"os\.(environ|getenv)", text):
        found.append(f"{name} reads the environment")
    for node in nodes(tree):
        if isinstance(node, ast.Global):
            found.append(f"{name}:{node.lineno} global {', '.join(node.names)}")
        elif isinstance(node, ast.ExceptHandler) and (
            node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
        ):
            found.append(f"{name}:{node.lineno} broad except")
    return found
