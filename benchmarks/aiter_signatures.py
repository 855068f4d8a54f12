"""Writes impl/aiter/signatures.json: what the AITER functions that we call take, read from sources of AITER.

    python -m benchmarks.aiter_signatures NAME=SOURCE [NAME=SOURCE ...]

SOURCE is a wheel or a source tree; NAME is what the release is called in the file. Nothing of AITER is imported or run.
What we call is every `Function` that a module of impl/aiter declares.
"""

import argparse
import ast
import importlib
import json
import pkgutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.worker.kernels.impl import aiter as provider
from services.worker.kernels.impl.aiter._host import SIGNATURES, Function


class Source:
    """AITER's modules, by dotted name, in a wheel or a folder."""

    def __init__(self, path: Path) -> None:
        self._wheel = zipfile.ZipFile(path) if path.is_file() else None
        self._folder = path
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            base = module.replace(".", "/")
            text = self._read(f"{base}.py") or self._read(f"{base}/__init__.py")
            self._trees[module] = None if text is None else ast.parse(text)
        return self._trees[module]

    def is_package(self, module: str) -> bool:
        return self._read(f"{module.replace('.', '/')}/__init__.py") is not None

    def _read(self, name: str) -> str | None:
        if self._wheel is not None:
            return self._wheel.read(name).decode() if name in self._wheel.namelist() else None
        path = self._folder / name
        return path.read_text() if path.is_file() else None


def signature(source: Source, place: str) -> list[str] | None:
    """The parameters at "module:attribute", each "name" or "name=default"; None if there is no such function."""
    module, _, attributes = place.partition(":")
    first, *rest = attributes.split(".")
    function = next(definitions(source, module, first), None)
    bound = False  # to an object, which its call then does not give
    if isinstance(function, ast.Assign) and isinstance(function.value, ast.Call):
        # an object that the module has made: its class has the method
        function, bound = next(definitions(source, module, getattr(function.value.func, "id", "")), None), True
    if isinstance(function, ast.ClassDef):
        name, bound = (rest[0], bound) if rest else ("__init__", True)
        methods = (item for item in function.body if isinstance(item, ast.FunctionDef) and item.name == name)
        function = next(methods, None)
    if not isinstance(function, ast.FunctionDef):
        return None
    parameters = written(function.args)
    return parameters[1:] if bound else parameters


def definitions(source: Source, module: str, name: str) -> Iterator[ast.stmt]:
    """What binds `name` in a module, the last first, followed through its imports."""
    tree = source.tree(module)
    if tree is None:
        return
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.col_offset == 0]
    statements += [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.col_offset]
    for node in sorted(statements, key=lambda node: -node.lineno):
        if name in bound_by(node):
            yield node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    wanted = name if alias.name == "*" else alias.name
                    yield from definitions(source, origin(source, module, node), wanted)


def bound_by(node: ast.stmt) -> list[str]:
    """The names that a definition or an assignment binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [getattr(target, "id", "") for target in node.targets] if isinstance(node, ast.Assign) else []


def origin(source: Source, module: str, node: ast.ImportFrom) -> str:
    """The module that an import in `module` names, absolute."""
    if not node.level:
        return node.module or ""
    parts = module.split(".") + ([""] if source.is_package(module) else [])
    return ".".join([*parts[: len(parts) - node.level], *([node.module] if node.module else [])])


def written(arguments: ast.arguments) -> list[str]:
    """As in the file: "name", or "name=default"."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    pairs = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [one.arg if default is None else f"{one.arg}={ast.unparse(default)}" for one, default in pairs]


def declared() -> list[Function]:
    """Every function that an implementation declares."""
    found: dict[Function, None] = {}
    for entry in pkgutil.iter_modules(provider.__path__):
        module = importlib.import_module(f"{provider.__name__}.{entry.name}")
        for item in vars(module).values():
            if isinstance(item, Function):
                found |= dict.fromkeys((item, *([item.twin.by] if item.twin is not None else [])))
    return list(found)


def called() -> list[str]:
    return sorted({place for function in declared() for place in function.places})


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.aiter_signatures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("releases", nargs="+", metavar="NAME=SOURCE")
    found = {}
    for release in parser.parse_args(arguments).releases:
        name, _, path = release.partition("=")
        source = Source(Path(path))
        found[name] = {place: signature(source, place) for place in called()}
    for place in called():
        if all(found[name][place] is None for name in found):
            sys.exit(f"no release has {place}")
    lines = [f"{json.dumps(name)}: {_rows(rows)}" for name, rows in found.items()]
    SIGNATURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _rows(rows: dict[str, list[str] | None]) -> str:
    """One function a line."""
    return "{\n" + ",\n".join(f"  {json.dumps(place)}: {json.dumps(row)}" for place, row in rows.items()) + "\n}"


if __name__ == "__main__":
    main(sys.argv[1:])
