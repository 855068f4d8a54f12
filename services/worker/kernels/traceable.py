"""Implementations that a compiler may not look into: each becomes a custom op of torch, the op's meaning its fake.

`traceable` is called once per implementation by `bind`. Outside of a trace the implementation is called as it is, since
the dispatch of a custom op costs more host time than the launch of a kernel. State: torch's table of ops, which grows.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ARGUMENTS = (Tensor, Tensor | None, int, float, bool, str, torch.dtype)
NAMESPACE = "valence"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_made: dict[Callable[..., Any], Callable[..., Any]] = {}
_names: Counter[str] = Counter()


def schema_of(run: Callable[..., Any], writes: tuple[str, ...]) -> str | None:
    """The custom op's arguments and results; None for a function whose arguments a custom op cannot have."""
    parameters = inspect.signature(run).parameters.values()
    if not all(parameter.annotation in ARGUMENTS for parameter in parameters):
        return None
    return torch.library.infer_schema(run, mutates_args=writes)


def traceable(
    name: str, run: Callable[..., Any], meaning: Callable[..., Any], writes: tuple[str, ...]
) -> Callable[..., Any]:
    """`run` with the same arguments, opaque to torch.compile. `writes` names the arguments that it changes in place.

    A function whose arguments are more than tensors and numbers comes back as it is: no compiled piece may call it.
    """
    if run in _made:
        return _made[run]
    schema = schema_of(run, writes)
    if schema is None:
        return run
    _names[name] += 1
    unique = name if _names[name] == 1 else f"{name}_{_names[name]}"
    _library.define(unique + schema)  # type: ignore[no-untyped-call]
    _library.impl(unique, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    # What only writes its arguments gives nothing to describe.
    fake = _nothing if schema.endswith("-> ()") else meaning
    torch.library.register_fake(f"{NAMESPACE}::{unique}", fake, lib=_library)
    custom = getattr(getattr(torch.ops, NAMESPACE), unique).default

    def call(*arguments: Any) -> Any:
        return custom(*arguments) if torch.compiler.is_compiling() else run(*arguments)

    _made[run] = call
    return call


def _nothing(*arguments: Any) -> None:
    """The fake of an op without results."""
