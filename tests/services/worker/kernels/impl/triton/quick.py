"""Triton's interpreter without what it does again and again for nothing; most of the op tests' time was that.

It patches `triton.language` anew for each call of a device function, makes a table of all types to look one up, and
computes every sum of integers a second time, for an assertion that it then leaves out. Caller: interpreter.py.
"""

import types
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

Change = tuple[object, str, object, object]  # owner, name, as it is, as a kernel that is interpreted needs it


def changes() -> list[Change]:
    """What the interpreter patches for any kernel."""
    visible = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    scope = interpreter._patch_lang(visible)
    wanted = [(owner, name, before, vars(owner)[name]) for owner, name, before in scope._changes]
    scope.restore()
    return wanted


class Patched:
    """The scope of one launch; a device function inside finds everything patched."""

    def __init__(self, wanted: list[Change]) -> None:
        self._wanted = wanted
        for owner, name, _, new in wanted:
            setattr(owner, name, new)

    def restore(self) -> None:
        for owner, name, before, _ in reversed(self._wanted):
            if before is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def quicken() -> None:
    """For the life of the process."""
    wanted, look_up = changes(), interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = look_up(kind)
        return known[kind.name]

    def device_function(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return self.rewrite()(*arguments, **keywords)

    interpreter._patch_lang = lambda kernel: Patched(wanted)
    interpreter._get_np_dtype = np_dtype
    interpreter.InterpretedFunction.__call__ = device_function
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
