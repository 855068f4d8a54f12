"""AITER's functions as this host has them, bound by dotted name and called by keyword.

AITER differs from image to image: parameters come, go and move. A `Function` finds out what the host's own takes: from
its Python signature where that is real, from the schema that it is registered under with torch where it is a wrapper,
else from signatures.json, what all the releases listed there have in common. What is missing is a sentence for `bind`,
at start and never while serving. Public: `Function`, `constant`, `refusal`, `HALF`. State: what was found, once.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from services.worker.kernels.registry import UNUSABLE, Facts

ARCHES = ("gfx942", "gfx950")
HALF = (torch.bfloat16, torch.float16)
SIGNATURES = Path(__file__).with_name("signatures.json")

Parameters = Mapping[str, bool]  # by name: whether a call must give it


class Twin(NamedTuple):
    """What serves the same call where AITER was installed without its compiled part: `call`, by means of `by`."""

    call: Callable[..., Any]
    by: "Function"


class Function:
    """`places`: where it may be, "module:attribute", the first that is there counts (AITER has moved modules).

    `needs`: what every call gives, and a host must know. `takes`: given too where the host knows it; only what may be
    left out without another result. `twin`: used where none of the places is there.
    """

    def __init__(self, *places: str, needs: Sequence[str], takes: Sequence[str] = (), twin: Twin | None = None) -> None:
        self.places, self.needs, self.takes, self.twin = places, tuple(needs), tuple(takes), twin

    def missing(self) -> str | None:
        """Why this host's AITER cannot be called so, or None."""
        found = bound(self)
        return found if isinstance(found, str) else None

    def __call__(self, /, **arguments: Any) -> Any:
        """Only where `missing` says None: what is missing is an AssertionError. A method has its object as `self`."""
        found = bound(self)
        assert not isinstance(found, str), found
        function, unknown = found
        if unknown:
            arguments = {name: value for name, value in arguments.items() if name not in unknown}
        return function(**arguments)


@cache
def bound(wanted: Function) -> tuple[Callable[..., Any], frozenset[str]] | str:
    """The host's function and what of `takes` it does not know, or the reason why there is none."""
    found = find(wanted.places)
    if isinstance(found, str):
        twin = wanted.twin
        return found if twin is None or twin.by.missing() is not None else (twin.call, frozenset(wanted.takes))
    place, function = found
    parameters = parameters_of(place, function)
    if isinstance(parameters, str):
        return parameters
    if unknown := [name for name in wanted.needs if name not in parameters]:
        return f"{_dotted(place)} of this host does not take {', '.join(unknown)}"
    given = {*wanted.needs, *wanted.takes}
    if more := [name for name, must in parameters.items() if must and name not in given]:
        return f"{_dotted(place)} of this host wants {', '.join(more)} too"
    return function, frozenset(wanted.takes) - parameters.keys()


@cache
def constant(place: str) -> Any:
    """A value of AITER's, of one of its enumerations say; only where it is there."""
    found = find((place,))
    assert not isinstance(found, str), found
    return found[1]


def refusal(facts: Facts, *functions: Function, dtypes: Sequence[torch.dtype] = HALF) -> str | None:
    """What all implementations ask: an architecture that AITER serves, a dtype, functions that are there."""
    if facts.arch not in ARCHES:
        return f"needs {' or '.join(ARCHES)}"
    if facts.dtype not in dtypes:
        return f"does not do {str(facts.dtype).removeprefix('torch.')}"
    return next((reason for function in functions if (reason := function.missing()) is not None), None)


def find(places: Sequence[str]) -> tuple[str, Callable[..., Any]] | str:
    """The first place that is there and what is at it, or the reason why none is."""
    reasons: list[str] = []
    for place in places:
        module_name, _, attributes = place.partition(":")
        try:
            item: Any = importlib.import_module(module_name)
            for attribute in attributes.split("."):
                item = getattr(item, attribute)
        except AttributeError:
            reasons.append(f"this host has no {_dotted(place)}")
        except UNUSABLE as error:
            reasons.append(f"{module_name} cannot be imported: {error}")
        else:
            return place, item
    return reasons[0]


def parameters_of(place: str, function: Callable[..., Any]) -> Parameters | str:
    """What a call of it may and must give, or the reason why nobody knows."""
    try:
        own = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        own = []  # made by C
    if own and not any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in own):
        return {parameter.name: parameter.default is parameter.empty for parameter in own}
    registered = getattr(torch.ops.aiter, place.rpartition(".")[2].rpartition(":")[2], None)
    if registered is not None:
        # a wrapper whose first argument is no tensor is registered with one more in front, which it fills in itself
        arguments = [argument for argument in registered.default._schema.arguments if argument.name != "dummy"]
        return {argument.name: not argument.has_default_value() for argument in arguments}
    listed = [found for release in releases().values() if (found := release.get(place)) is not None]
    if not listed:
        return f"nobody knows what {_dotted(place)} of this host takes"
    common = [name for name in listed[0] if all(name in other for other in listed)]
    return {name: any(other[name] for other in listed) for name in common}


@cache
def releases() -> dict[str, dict[str, Parameters | None]]:
    """signatures.json: by release and place, the parameters; None where a release lacks the function."""
    written: dict[str, dict[str, list[str] | None]] = json.loads(SIGNATURES.read_text())
    return {release: {place: _parsed(lines) for place, lines in rows.items()} for release, rows in written.items()}


def _parsed(lines: list[str] | None) -> Parameters | None:
    return None if lines is None else {line.partition("=")[0]: "=" not in line for line in lines}


def _dotted(place: str) -> str:
    return place.replace(":", ".")
