"""Opaque implementations in compiled functions: seen as one op each, with the right results, writes and fakes."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.kernels.ops.add_linear import add_linear
from services.worker.kernels.ops.moe_gated import moe_gated
from services.worker.kernels.ops.paged_attention import paged_attention
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.outcome import convert, tensors
from services.worker.kernels.registry import Facts, Impl, Op, all_ops, bind, find_impls
from services.worker.kernels.traceable import schema_of, traceable
from tests.conftest import HAS_GPU, interpreted

# what compiled pieces call
CALLED = [
    "add_linear",
    "embedding",
    "gelu_and_mul",
    "grouped_linear",
    "linear",
    "moe_gated",
    "moe_route",
    "norm_gated_linear",
    "norm_linear",
    "norm_route",
    "rms_norm",
    "silu_and_mul",
]
OPAQUE = [op for op in all_ops().values() if op.name in CALLED]
with interpreted():  # before other tests import the kernels as what a GPU would compile
    IMPLS, _ = find_impls("triton")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def numpy_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What no tracer could follow."""
    values = x.detach().numpy()
    return torch.from_numpy(values / (values**2).mean(-1, keepdims=True) ** 0.5 * weight.detach().numpy())


def numpy_add(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    residual.numpy()[:] += x.detach().numpy() @ weight.detach().numpy().T


class Graphs:
    """A backend that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.seen.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward


def test_a_compiled_function_calls_the_implementation_as_one_op() -> None:
    norm = traceable("numpy_rms_norm", numpy_norm, rms_norm.meaning, ())
    add = traceable("numpy_add_linear", numpy_add, add_linear.meaning, ("residual",))
    assert traceable("numpy_rms_norm", numpy_norm, rms_norm.meaning, ()) is norm

    def piece(x: Tensor, weight: Tensor, product: Tensor) -> Tensor:
        add(x, norm(x, weight, 0.0), product, None)
        return x * 2

    x, weight, product = torch.randn(5, 8), torch.rand(8), torch.randn(8, 8)
    wanted = x + rms_norm.meaning(x, weight, 0.0) @ product.T
    for backend in (graphs := Graphs(), "aot_eager"):
        torch._dynamo.reset()
        changed = x.clone()
        result = torch.compile(piece, backend=backend, fullgraph=True, dynamic=True)(changed, weight, product)
        torch.testing.assert_close(changed, wanted)
        torch.testing.assert_close(result, wanted * 2)
    assert len(graphs.seen) == 1
    assert [name for name in graphs.seen[0] if name.startswith("valence")] == [
        "valence.numpy_rms_norm.default",
        "valence.numpy_add_linear.default",
    ]


def test_outside_of_a_trace_there_is_no_dispatch() -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    norm = traceable("plain_rms_norm", lambda_norm, rms_norm.meaning, ())
    with Watch():
        norm(torch.randn(2, 4), torch.ones(4), 1e-5)
    assert seen and not [name for name in seen if name.startswith("valence")]


def lambda_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * weight + eps


def test_compiled_pieces_call_only_what_a_custom_op_can_take() -> None:
    assert [op.name for op in OPAQUE] == CALLED
    assert all(schema_of(op.meaning, op.writes) for op in OPAQUE)


def test_what_no_custom_op_can_take_stays_as_it_is() -> None:
    assert schema_of(paged_attention.meaning, ()) is None
    assert traceable("x", paged_attention.meaning, paged_attention.meaning, ()) is paged_attention.meaning


def test_two_implementations_of_one_name_are_two_ops() -> None:
    def first(x: Tensor) -> Tensor:
        return x + 1

    def second(x: Tensor) -> Tensor:
        return x + 2

    both = [traceable("twice", run, run, ()) for run in (first, second)]
    compiled = torch.compile(lambda x: both[0](x) * both[1](x), backend="eager", fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [6.0] * 3


def test_bind_hides_implementations_and_meanings_that_decide_by_values() -> None:
    found = {"rms_norm": Impl(rms_norm, "triton", numpy_norm)}
    plain = bind(("triton", "torch"), Facts("cpu"), finder=lambda provider: (found, ""))
    opaque = bind(("triton", "torch"), Facts("cpu"), finder=lambda provider: (found, ""), opaque=True)
    assert plain(rms_norm) is numpy_norm and opaque(rms_norm) is not numpy_norm
    assert opaque(add_linear) is add_linear.meaning and opaque(moe_gated) is not moe_gated.meaning
    assert plain.digest == opaque.digest


def bits(tensor: Tensor) -> Tensor:
    """Equal also where numbers are none."""
    return tensor.contiguous().flatten().view(torch.uint8)


SUMS_OF_ONE = ("all_reduce",)  # a process without a group has nothing to add


def inside(argument: Any) -> list[Tensor]:
    return [tensor for _, tensor in tensors(argument, "")]


def differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("op", all_ops().values(), ids=lambda op: op.name)
def test_an_op_writes_what_it_says(op: Op[Any]) -> None:
    made = (case.make(torch.float32) for case in op.cases)
    arguments = max(made, key=lambda arguments: len(inside(arguments)))  # some have tensors that others lack
    before = convert(arguments, torch.clone)
    op.meaning(*arguments)
    named = zip(op.meaning.__annotations__, arguments, before, strict=False)
    changed = {name for name, argument, copy in named if any(map(differ, inside(argument), inside(copy)))}
    assert changed == (set() if op.name in SUMS_OF_ONE else set(op.writes))


@pytest.mark.parametrize("op", OPAQUE, ids=lambda op: op.name)
def test_meanings_are_good_fakes(op: Op[Any]) -> None:
    """Held against the meaning itself, run as if it were an implementation; Triton's follow below."""
    _opcheck(op, op.meaning, f"meaning_{op.name}")


@pytest.mark.parametrize("name", sorted(set(IMPLS) & set(CALLED)))
def test_triton_implementations_are_what_their_ops_say(name: str) -> None:
    with interpreted():
        impl = IMPLS[name]
        _opcheck(impl.op, impl.run, f"triton_{name}", "cuda" if HAS_GPU else "cpu")


def _opcheck(op: Op[Any], run: Callable[..., Any], name: str, device: str = "cpu") -> None:
    @functools.wraps(run)
    def fresh(*arguments: Any) -> Any:  # whatever other tests have wrapped
        return run(*arguments)

    traceable(name, fresh, op.meaning, op.writes)
    smallest = min((case.make(torch.float32) for case in op.cases), key=_size)
    arguments = [value.to(device) if isinstance(value, Tensor) else value for value in smallest]
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.valence, name).default, tuple(arguments), test_utils=checks)


def _size(arguments: tuple[Any, ...]) -> int:
    """Of cases that are not empty."""
    sizes = [argument.numel() for argument in arguments if isinstance(argument, Tensor)]
    return sum(sizes) if all(sizes) else 1 << 62


def test_a_type_of_numbers_is_an_argument() -> None:
    """Quantizers are told what to round to."""

    def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        numbers = torch.from_numpy(x.detach().numpy().round()).to(dtype)
        return numbers, torch.ones(len(x), 1)

    def meaning(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return x.round().to(dtype), torch.ones(len(x), 1)

    run = traceable("numpy_rounded", rounded, meaning, ())
    x = torch.randn(5, 8) * 9
    for backend in (graphs := Graphs(), "aot_eager"):
        compiled = torch.compile(lambda x: run(x, torch.int8), backend=backend, fullgraph=True)
        numbers, scales = compiled(x)
        assert torch.equal(numbers, x.round().to(torch.int8)) and scales.shape == (5, 1)
    assert graphs.seen == [
        ["valence.numpy_rounded.default", "<built-in function getitem>", "<built-in function getitem>"]
    ]
