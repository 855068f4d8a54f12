"""Which formats there are, and who can read which tool's configuration: found by scanning this folder, nowhere listed.

A module's `FORMAT` is a CodedFormat; its `METHODS` are readers of a `quantization_config` by its quant_method.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType

from services.worker.quant.coded import CodedFormat
from services.worker.quant.rules import Rules, Settings

PACKAGE = "services.worker.quant"
Reader = Callable[[Settings], Rules]


def _modules() -> Iterator[ModuleType]:
    package = importlib.import_module(PACKAGE)
    for entry in sorted(pkgutil.iter_modules(package.__path__), key=lambda entry: entry.name):
        if f"{PACKAGE}.{entry.name}" != __name__:
            yield importlib.import_module(f"{PACKAGE}.{entry.name}")


@cache
def all_formats() -> dict[str, CodedFormat]:
    found: dict[str, CodedFormat] = {}
    for module in _modules():
        form = getattr(module, "FORMAT", None)
        if isinstance(form, CodedFormat):
            assert form.name not in found, f"two formats are called {form.name}"
            found[form.name] = form
    return found


@cache
def all_readers() -> dict[str, Reader]:
    found: dict[str, Reader] = {}
    for module in _modules():
        for method, reader in getattr(module, "METHODS", {}).items():
            assert method not in found, f"two modules read {method}"
            found[method] = reader
    return found
