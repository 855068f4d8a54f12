"""The tree keeps its own rules, and the rules can fail."""

import ast
import re

import pytest

from tests.arch.rules import ROOT, forbidden_imports, impurities, nodes, oversized, parsed


def test_imports_follow_the_layers() -> None:
    assert [finding for name, tree, _ in parsed() for finding in forbidden_imports(name, tree)] == []


def test_files_functions_and_classes_keep_their_limits() -> None:
    assert [finding for name, tree, text in parsed() for finding in oversized(name, tree, text)] == []


def test_no_globals_no_broad_excepts_one_reader_of_the_environment() -> None:
    assert [finding for name, tree, text in parsed() for finding in impurities(name, tree, text)] == []


def test_every_module_says_what_it_is() -> None:
    assert [name for name, tree, text in parsed() if text.strip() and not ast.get_docstring(tree)] == []


def has_logic(tree: ast.Module) -> bool:
    """Whether any function has a body: a file of declarations is tested by those who use it."""
    functions = [n for n in nodes(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(not isinstance(line, ast.Expr | ast.Pass) for function in functions for line in function.body)


def test_every_source_file_with_logic_has_its_mirror() -> None:
    """Entry points and packages' __init__ are covered by the end-to-end tests, model files by the registry's."""
    declares = re.compile(r"services/worker/models/(?!spec|registry)")
    missing = []
    for name, tree, _ in parsed():
        package = name.partition("/")[0]
        if name.endswith(("__init__.py", "__main__.py")) or package == "benchmarks" or not has_logic(tree):
            continue
        if declares.match(name):
            continue
        folder, _, file = name.rpartition("/")
        if not (ROOT / "tests" / folder / f"test_{file}").exists():
            missing.append(name)
    assert missing == []


def test_every_test_mirrors_a_source_file() -> None:
    """Or what lies beside it in tests/."""
    orphans = []
    for package in ("common", "services", "valence"):
        for path in sorted((ROOT / "tests" / package).rglob("test_*.py")):
            source = path.relative_to(ROOT / "tests").with_name(path.name.removeprefix("test_"))
            if path.with_name(source.name).exists():
                continue
            if not (ROOT / source).exists() and not (ROOT / source.with_suffix("")).is_dir():
                orphans.append(path.relative_to(ROOT).as_posix())
    assert orphans == []


def test_engine_files_name_no_model() -> None:
    """A model is one declarative file: nothing else in the worker knows a family by name."""
    words = re.compile(r"\b(llama|qwen\d?|mistral|deepseek|gemma|mixtral)\b", re.IGNORECASE)
    allowed = re.compile(r"^services/worker/(models/|source|gguf|loader)")
    found = []
    for name, tree, _ in parsed():
        if name.startswith("services/worker/") and not allowed.match(name):
            texts = [n.value for n in nodes(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            docs = {ast.get_docstring(n, clean=False) for n in nodes(tree) if _documented(n)}
            found += [f"{name}: {text[:60]!r}" for text in texts if text not in docs and words.search(text)]
    assert found == []


def _documented(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)


@pytest.mark.parametrize(
    ("name", "code", "finding"),
    [
        ("services/api/x.py", "import services.worker.runner", "imports services.worker.runner"),
        ("services/api/x.py", "from services import worker", "imports services.worker"),
        ("services/scheduler/core.py", "import time", "imports time"),
        ("services/scheduler/core.py", "from torch import nn", "imports torch.nn"),
        ("common/config.py", "import zmq", "imports zmq"),
        ("services/worker/models/x.py", "import msgspec", "imports msgspec"),
        ("services/worker/quant/x.py", "import pickle", "imports pickle"),
    ],
)
def test_a_forbidden_import_is_found(name: str, code: str, finding: str) -> None:
    assert any(finding in found for found in forbidden_imports(name, ast.parse(code)))


def test_a_long_function_and_a_broad_except_are_found() -> None:
    code = "def f():\n" + "    x = 1\n" * 80 + "\ntry:\n    f()\nexcept Exception:\n    pass\n"
    assert oversized("common/x.py", ast.parse(code), code) == ["common/x.py:1 f() has 81 lines"]
    assert impurities("common/x.py", ast.parse(code), code) == ["common/x.py:85 broad except"]
