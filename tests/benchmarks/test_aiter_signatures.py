"""Signatures read from sources: through imports, stars, methods of objects and classes, in a wheel and in a folder."""

import json
import zipfile
from pathlib import Path

import pytest

from benchmarks import aiter_signatures
from benchmarks.aiter_signatures import Source, called, main, signature
from services.worker.kernels.impl.aiter import _host
from services.worker.kernels.impl.aiter._host import Function

FILES = {
    "aiter/__init__.py": "from .ops.norm import *\nif True:\n    from .ops.old import late as renamed\n",
    "aiter/ops/__init__.py": "",
    "aiter/ops/norm.py": "from ..deep import hidden\ndef norm(x, weight, eps: float = 1e-5, *, fast=(1, 2)): ...\n",
    "aiter/ops/old.py": "def late(x): ...\ndef late(x, y=None): ...\n",
    "aiter/deep.py": "def hidden(a): ...\n",
    "aiter/gemm.py": "class Gemm:\n  def __init__(self, n): ...\n  def mm(self, inp, bias=None): ...\ngemm = Gemm(1)\n",
}
WANTED = {
    "aiter:norm": ["x", "weight", "eps=1e-05", "fast=(1, 2)"],
    "aiter:renamed": ["x", "y=None"],
    "aiter:hidden": ["a"],
    "aiter.gemm:gemm.mm": ["inp", "bias=None"],
    "aiter.gemm:Gemm": ["n"],
    "aiter.gemm:Gemm.mm": ["self", "inp", "bias=None"],
    "aiter.gemm:Gemm.other": None,
    "aiter.ops.norm:norm": ["x", "weight", "eps=1e-05", "fast=(1, 2)"],
    "aiter:absent": None,
    "aiter.nowhere:f": None,
    "aiter.gemm:gemm.other": None,
}


@pytest.fixture(params=["folder", "wheel"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "wheel":
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
            for name, text in FILES.items():
                wheel.writestr(name, text)
        return tmp_path / "a.whl"
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_signatures_are_as_written(path: Path) -> None:
    source = Source(path)
    assert {place: signature(source, place) for place in WANTED} == WANTED


def test_a_function_that_no_release_has_is_an_error_and_others_are_written(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiter_signatures, "SIGNATURES", tmp_path / "written.json")
    monkeypatch.setattr(aiter_signatures, "declared", lambda: [Function("aiter:norm", "aiter:hidden", needs=())])
    main([f"old={path}", f"new={path}"])
    written = json.loads((tmp_path / "written.json").read_text())
    assert written["old"] == written["new"] == {"aiter:hidden": ["a"], "aiter:norm": WANTED["aiter:norm"]}
    monkeypatch.setattr(aiter_signatures, "declared", lambda: [Function("aiter:absent", needs=())])
    with pytest.raises(SystemExit, match="no release has aiter:absent"):
        main([f"old={path}"])


def test_the_file_lists_what_is_called() -> None:
    """Else: `python -m benchmarks.aiter_signatures`, as its docstring has it."""
    for rows in _host.releases().values():
        assert sorted(rows) == called()
