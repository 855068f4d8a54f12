"""Levels: how many graphs, the same results, what inductor finds again at a second start."""

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common import env
from services.worker.compile import (
    CAPTURED,
    EAGER,
    FUSIBLE,
    INDUCTOR,
    TRACED,
    Builds,
    build_ahead,
    builds,
    choose_level,
    compile_pieces,
    count_builds,
    is_worth_compiling,
    tensors_of,
)
from services.worker.kernels.ops.add_linear import add_linear
from services.worker.kernels.ops.embedding import embedding
from services.worker.kernels.ops.norm_gated_linear import norm_gated_linear
from services.worker.kernels.ops.norm_linear import norm_linear
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.ops.silu_and_mul import silu_and_mul
from services.worker.kernels.registry import Bindings, Facts, Impl, Op, bind
from services.worker.layers.decoder import Decoder, Pieces, build_decoder
from services.worker.loader import expected_shapes
from services.worker.models.qwen3 import MODEL
from services.worker.models.spec import Config
from services.worker.quant.none import DenseProducts, DenseWeight
from tests.conftest import HAS_GPU, interpreted

CONFIG = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Compiled code belongs to functions, which all tests share."""
    before = torch._dynamo.config.specialize_float
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.specialize_float = before


class Drawn:
    """Parameters of random numbers, with products of the bound ops."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], bindings: Bindings) -> None:
        generator = torch.Generator().manual_seed(3)
        self._tensors = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
        self._bindings = bindings

    def weight(self, *names: str) -> DenseWeight:
        values = self.tensor(*names)
        return DenseWeight(values, None, DenseProducts(values, self._bindings))

    def tensor(self, *names: str, wide: bool = False) -> Tensor:
        return torch.cat([self._tensors[name] for name in names])

    def has(self, name: str) -> bool:
        return name in self._tensors


def untraceable(op: Op[Any]) -> Impl[Any]:
    """The meaning behind something that no tracer can follow."""

    @functools.wraps(op.meaning)
    def run(*arguments: Any) -> Any:
        assert arguments[0].numpy() is not None
        return op.meaning(*arguments)

    return Impl(op, "triton", run)


IMPLS = {op.name: untraceable(op) for op in (embedding, norm_linear, norm_gated_linear, add_linear)}
TORCH = bind(("torch",), Facts("cpu"))
with interpreted():  # before other tests import the kernels as what a GPU would compile
    TRITON = bind(("triton", "torch"), Facts("cpu"), opaque=True)
OPAQUE = bind(("triton", "torch"), Facts("cpu"), finder=lambda provider: (IMPLS, ""), opaque=True)


def make_model(bindings: Bindings, num_layers: int = 12) -> Decoder:
    spec = replace(MODEL.read(Config(CONFIG)), num_layers=num_layers)
    return build_decoder(spec, MODEL, Drawn(expected_shapes(spec, MODEL.names), bindings), bindings)


def forward(model: Decoder, pieces: Pieces, num_tokens: int) -> Tensor:
    """All pieces in order; what stands between them is the projection's queries."""
    width = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    with torch.inference_mode():
        x, qkv = pieces.start(model.embedding, model.layers[0], torch.arange(num_tokens, dtype=torch.int32))
        for layer, following in itertools.pairwise(model.layers):
            qkv = pieces.between(layer, following, x, qkv[:, :width].contiguous())
        pieces.end(model.layers[-1], x, qkv[:, :width].contiguous())
    return x


def compiled_graphs(model: Decoder, lengths: Sequence[int]) -> list[torch.fx.GraphModule]:
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    pieces = compile_pieces(INDUCTOR, model, backend)
    for num_tokens in lengths:
        torch.testing.assert_close(forward(model, pieces, num_tokens), forward(model, Pieces(), num_tokens))
    return seen


@pytest.mark.parametrize("bindings", [TORCH, OPAQUE], ids=["meanings", "opaque"])
def test_three_graphs_for_any_layers_and_tokens_and_three_for_one_token(bindings: Bindings) -> None:
    model = make_model(bindings)
    assert len(compiled_graphs(model, (7, 2, 33))) == 3
    assert len(compiled_graphs(model, (1, 1))) == 3


def test_only_the_number_of_tokens_is_symbolic_and_numbers_are_constants() -> None:
    for graph in compiled_graphs(make_model(TORCH), (7,)):
        symbols = [node for node in graph.graph.nodes if node.op == "placeholder" and node.type is torch.SymInt]
        assert len(symbols) <= 1
        assert not [node for node in graph.graph.nodes if node.target == "item"], "a norm's epsilon became an input"


def test_triton_kernels_are_opaque_too() -> None:
    """Interpreted; on a host with a GPU, which refuses CPU tensors, the meanings run."""
    with interpreted():
        model = make_model(TRITON, 3)
        pieces = compile_pieces(TRACED, model)
        for num_tokens in (3, 1):
            torch.testing.assert_close(forward(model, pieces, num_tokens), forward(model, Pieces(), num_tokens))
    if not HAS_GPU:
        assert TRITON.provider(norm_linear) == TRITON.provider(add_linear) == "triton"


@pytest.mark.parametrize("level", [EAGER, TRACED])
def test_levels_without_a_compiler_change_nothing(level: int) -> None:
    model = make_model(OPAQUE, 3)
    pieces = compile_pieces(level, model)
    assert (pieces == model.pieces) is (level == EAGER)
    for num_tokens in (5, 1):
        assert torch.equal(forward(model, pieces, num_tokens), forward(model, Pieces(), num_tokens))


def test_writes_survive_functionalization() -> None:
    model = make_model(OPAQUE, 3)
    pieces = compile_pieces(INDUCTOR, model, "aot_eager")
    assert torch.equal(forward(model, pieces, 5), forward(model, Pieces(), 5))


def test_a_second_start_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor on the CPU, for the only shape that a test can wait for."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    env.keep_compiled_in(tmp_path)
    model = make_model(OPAQUE, 2)
    starts = []
    for _ in range(2):
        torch._dynamo.reset()
        before = builds()
        pieces = compile_pieces(INDUCTOR, model)
        torch.testing.assert_close(forward(model, pieces, 5), forward(model, Pieces(), 5))
        starts.append(Builds(*(after - earlier for after, earlier in zip(builds(), before, strict=True))))
    assert starts == [Builds(compiled=3, found=0), Builds(compiled=0, found=3)]


def test_all_tensors_of_a_model_are_found_once() -> None:
    model = make_model(TORCH, 2)
    found = list(tensors_of((model.embedding, model.layers, model.layers[0]), set()))
    assert len({id(tensor) for tensor in found}) == len(found) == 1 + 2 * 8


def test_the_level_follows_the_device_unless_it_is_given() -> None:
    assert choose_level(-1, torch.device("cpu")) == EAGER
    assert choose_level(-1, torch.device("cuda")) == CAPTURED
    assert choose_level(1, torch.device("cuda")) == TRACED


def test_level_3_compiles_only_what_it_can_fuse() -> None:
    def finder(provider: str) -> tuple[dict[str, Impl[Any]], str]:
        return {op.name: Impl(op, provider, op.meaning) for op in FUSIBLE}, ""

    fused = bind(("triton", "torch"), Facts("cpu"), finder=finder)
    assert [is_worth_compiling(level, fused) for level in range(4)] == [False, True, True, False]
    assert [is_worth_compiling(level, TORCH) for level in range(4)] == [False, True, True, True]


def test_counting_can_be_switched_on_anywhere() -> None:
    count_builds()
    assert builds() >= (0, 0)


def test_counting_does_not_load_a_compiler() -> None:
    """Which would take seconds of every start at level 0."""
    code = "import sys; from services.worker import compile as c; c.builds(); print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_nothing_is_built_ahead_where_an_op_of_the_model_is_torchs() -> None:
    """Its dry run would read what no kernel has written. Ops that nobody has asked for do not count."""
    runs: list[int] = []

    def finder(provider: str) -> tuple[dict[str, Impl[Any]], str]:
        return {rms_norm.name: Impl(rms_norm, provider, rms_norm.meaning)}, ""

    bindings = bind(("triton", "torch"), Facts("cpu"), finder=finder)
    for op in (rms_norm, silu_and_mul):
        bindings(op)
        build_ahead(bindings, lambda: runs.append(1), lambda done, total: None)
        assert runs == [1], op.name
