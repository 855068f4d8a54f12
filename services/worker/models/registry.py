"""Finds model files by scanning this folder: each module with a `MODEL` declares architectures."""

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from services.worker.models.spec import ModelDef


class Found(NamedTuple):
    """A declaration and the file it is in, relative to this folder."""

    file: str
    model: ModelDef


def index(found: Iterable[Found]) -> dict[str, Found]:
    """By architecture name. Raises ValueError if two files declare the same."""
    by_name: dict[str, Found] = {}
    for item in found:
        for architecture in item.model.architectures:
            if architecture in by_name:
                raise ValueError(f"{architecture} is declared in {by_name[architecture].file} and in {item.file}")
            by_name[architecture] = item
    return by_name


@cache
def all_models() -> dict[str, Found]:
    """Every architecture this build can run."""
    package = importlib.import_module("services.worker.models")
    found = []
    for entry in sorted(pkgutil.iter_modules(package.__path__), key=lambda entry: entry.name):
        model = getattr(importlib.import_module(f"{package.__name__}.{entry.name}"), "MODEL", None)
        if isinstance(model, ModelDef):
            found.append(Found(f"{entry.name}.py", model))
    return index(found)


def find_model(architectures: Iterable[str]) -> tuple[str, ModelDef]:
    """The first architecture that is known, and its declaration. Raises ValueError that lists the known ones."""
    names = list(architectures)
    for name in names:
        if name in all_models():
            return name, all_models()[name].model
    known = ", ".join(sorted(all_models()))
    raise ValueError(f"architecture {', '.join(names) or '(none)'} is not supported; supported: {known}")
