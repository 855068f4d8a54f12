"""One case of an op on one implementation, held against the op's meaning on the same device. Pure; no process.

The arguments are made anew for each run. What the meaning leaves as it is must stay so in every bit; what it gives must
be finite where the meaning's is, and near it: a kernel that sums in another order may leave the op's tolerance in one
element of ten thousand, and never by more than eight times.
"""

import importlib
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from services.worker.kernels.outcome import Mover, convert, equal_bits, outcome
from services.worker.kernels.registry import Case, Facts, Impl, Tolerance

RARE, FAR = 1e-4, 8.0
FNUZ_ARCH = "gfx942"
RANDOM = (torch.randn, torch.rand, torch.randint, torch.randperm)


class OnDevice(TorchFunctionMode):
    """Random numbers of a CPU's generator are drawn on the device instead: a second for a matrix of a large model."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._generators: dict[int, torch.Generator] = {}
        self._kept: list[torch.Generator] = []  # so that no id is given twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        if func in RANDOM and generator is not None and generator.device.type == "cpu":
            if id(generator) not in self._generators:
                own = torch.Generator(self._device).manual_seed(generator.initial_seed())
                self._generators[id(generator)] = own
                self._kept.append(generator)
            kwargs |= {"generator": self._generators[id(generator)], "device": self._device}
        return func(*args, **kwargs)


def make_arguments(case: Case, facts: Facts, device: torch.device) -> tuple[Any, ...]:
    """The case's arguments on the device; the same each time."""
    with ExitStack() as modes:
        if device.type != "cpu":
            modes.enter_context(torch.device(device))
            modes.enter_context(OnDevice(device))
        made = case.make(facts.dtype)
    moved: tuple[Any, ...] = convert(made, Mover(device)) if device.type != "cpu" else made
    return convert(moved, own_8_bits) if facts.arch == FNUZ_ARCH else moved


def own_8_bits(tensor: Tensor) -> Tensor:
    """8-bit floats as gfx942 has them, which end at 240 and have no negative zero; the same values."""
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor
    return tensor.float().clamp(-240.0, 240.0).to(torch.float8_e4m3fnuz)


class Pages:
    """The KV cache among an implementation's arguments, in the layout that it takes; the meaning's is by tokens."""

    def __init__(self, impl: Impl[Any], facts: Facts) -> None:
        names = list(inspect.signature(impl.op.meaning).parameters)
        layout = impl.layout(facts) if hasattr(impl, "layout") else "tokens"
        self._at = names.index("k_cache") if layout != "tokens" and "k_cache" in names else -1
        assert self._at < 0 or names[self._at + 1] == "v_cache", "keys and values lie side by side"

    def laid_out(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._changed(arguments, "shuffled")

    def by_tokens(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._changed(arguments, "in_order")

    def _changed(self, arguments: tuple[Any, ...], how: str) -> tuple[Any, ...]:
        if self._at < 0:
            return arguments
        layouts: Any = importlib.import_module("services.worker.kernels.layout")
        pages = getattr(layouts, how)(arguments[self._at], arguments[self._at + 1])
        return (*arguments[: self._at], *pages, *arguments[self._at + 2 :])


def gives(impl: Impl[Any], result: Any, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """What a call gives and leaves, without arguments that nobody reads afterwards."""
    names = list(inspect.signature(impl.op.meaning).parameters)
    scratch = {f"argument.{names.index(name)}" for name in getattr(impl.op, "scratch", ())}
    return {name: tensor for name, tensor in outcome(result, arguments).items() if name not in scratch}


def try_case(
    impl: Impl[Any],
    case: Case,
    facts: Facts,
    device: torch.device,
    few: float = 0.0,
    begin: Callable[[], None] = lambda: None,
) -> str | None:
    """Runs the case; returns what is wrong, or None. `few`: the share of rows that may be another choice.

    Raises whatever the implementation raises. `begin` is called when the arguments and what should come of them are
    there: what goes wrong before is no fault of the implementation's.
    """
    pages = Pages(impl, facts)
    untouched = gives(impl, None, make_arguments(case, facts, device))
    arguments = make_arguments(case, facts, device)
    wanted = gives(impl, impl.op.meaning(*arguments), arguments)
    arguments = pages.laid_out(make_arguments(case, facts, device))
    _wait(device)
    begin()
    got = gives(impl, impl.run(*arguments), pages.by_tokens(arguments))
    _wait(device)
    return differences(got, wanted, untouched, impl.op.tolerances[facts.dtype], few)


def try_captured(impl: Impl[Any], case: Case, facts: Facts, device: torch.device) -> str | None:
    """Captures a run, replays it on fresh arguments; returns what is wrong with the replay, or None.

    Only on a GPU, after a run that was right. Raises what capturing raises.
    """
    pages = Pages(impl, facts)
    fresh, held, eager = (pages.laid_out(make_arguments(case, facts, device)) for _ in range(3))
    wanted = gives(impl, impl.run(*eager), eager)
    graph = torch.cuda.CUDAGraph()
    _wait(device)
    with torch.cuda.graph(graph):
        result = impl.run(*held)
    for target, source in zip(outcome(None, held).values(), outcome(None, fresh).values(), strict=True):
        target.copy_(source)
    graph.replay()
    _wait(device)
    return differences(gives(impl, result, held), wanted, {}, impl.op.tolerances[facts.dtype], 0.0)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def differences(
    got: dict[str, Tensor], wanted: dict[str, Tensor], untouched: dict[str, Tensor], tolerance: Tolerance, few: float
) -> str | None:
    """The first difference that matters, as a sentence; None if there is none."""
    if list(got) != list(wanted):
        return f"gives {', '.join(got)} instead of {', '.join(wanted)}"
    for name, right in wanted.items():
        left = got[name]
        if left.dtype != right.dtype or left.shape != right.shape:
            shapes = f"{tuple(left.shape)} of {left.dtype} instead of {tuple(right.shape)} of {right.dtype}"
            return f"{name} is {shapes}"
        if name in untouched and equal_bits(untouched[name], right):
            if not equal_bits(left, right):
                return f"{name} was changed, and should not be"
        elif reason := _difference(left, right, tolerance, few):
            return f"{name} {reason}"
    return None


def _difference(left: Tensor, right: Tensor, tolerance: Tolerance, few: float) -> str | None:
    if not right.numel():
        return None
    if right.is_floating_point():
        if unexpected := int((~left.float().isfinite() & right.float().isfinite()).sum()):
            return f"has {unexpected} NaN or infinite numbers of {right.numel()}"
        if few == 0.0:
            return _distance(left.float(), right.float(), tolerance, 0.125 if right.element_size() == 1 else 0.0)
    wrong = left != right
    if right.is_floating_point():
        near = tolerance.absolute + tolerance.relative * right.abs()
        wrong &= ~((left - right).abs() <= near)
    rows = wrong if wrong.dim() < 2 else wrong.flatten(1).any(1)
    if (count := int(rows.sum())) > few * rows.numel() + (few > 0):
        return f"differs in {count} of {rows.numel()} rows"
    return None


def _distance(left: Tensor, right: Tensor, tolerance: Tolerance, unit: float) -> str | None:
    """`unit`: of the last place of 8-bit floats, which a small difference before the rounding moves by one."""
    most = float(right.abs().nan_to_num(0.0).max()) if unit else 0.0
    absolute = tolerance.absolute + unit * 2.0**-6 + tolerance.of_largest * most
    allowed = absolute + (tolerance.relative + unit) * right.abs()
    apart = (left - right).abs().masked_fill((left == right) | right.isnan(), 0.0)  # infinities of both are equal
    share = (apart / allowed.clamp(min=1e-30)).nan_to_num(torch.inf, torch.inf)  # an infinity that is not the meaning's
    count = int((share > 1.0).sum())
    if not count:
        return None
    worst = int(share.argmax())
    if count <= RARE * right.numel() and float(share.flatten()[worst]) <= FAR:
        return None
    found, should = float(left.flatten()[worst]), float(right.flatten()[worst])
    return f"is wrong in {count} of {right.numel()} numbers, at worst {found:.5g} instead of {should:.5g}"
