"""Conversion at load: every format of `worker.quantize`, what it costs in memory, sizes that do not divide."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.config import Worker
from services.worker.layers.decoder import build_decoder
from services.worker.layers.moe import MoeMlp
from services.worker.loader import load_parameters
from services.worker.models.registry import find_model
from services.worker.models.spec import Config
from services.worker.quant.catalog import all_formats
from services.worker.quant.registry import choose_policy
from tests.services.worker.quant.coded_checkpoints import DENSE, MOE, random_tensors, write
from tests.services.worker.quant.loading import BINDINGS, load, logits

FORMATS = [name for name in get_args(get_type_hints(Worker, include_extras=False)["quantize"]) if name]
# Of logits of random weights, which have no structure that would help: rounding of weights and activations.
NEAR = {"fp8": 0.15, "fp8_block": 0.15, "int8": 0.05, "int4": 0.35, "mxfp4": 0.4}


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def test_all_that_can_be_asked_for_are_formats() -> None:
    assert set(FORMATS) == set(NEAR) <= set(all_formats())


@pytest.mark.parametrize("name", FORMATS)
def test_linear_layers_and_experts_are_converted(name: str, tmp_path: Path) -> None:
    for config in (DENSE, MOE):
        folder = write(tmp_path / config["architectures"][0], config, random_tensors(config))
        (wide, _), (decoder, _) = load(folder), load(folder, quantize=name)
        layer = decoder.layers[0]
        assert layer.attention.project.weight.format_name == layer.attention.out.weight.format_name == name
        assert decoder.head.weight.format_name == "none", "the head stays as it is"
        if isinstance(layer.mlp, MoeMlp):
            assert layer.mlp.experts.format_name == name
        bits = layer.attention.out.weight.num_bytes * 8 / 128**2
        assert bits == pytest.approx(8 * all_formats()[name].bytes_per_parameter(), rel=0.04)
        if config is DENSE:
            assert distance(logits(decoder), logits(wide)) < NEAR[name]


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_that_do_not_divide_are_filled_up(name: str, tmp_path: Path) -> None:
    config = {**DENSE, "hidden_size": 72, "intermediate_size": 200, "head_dim": 24, "num_attention_heads": 3}
    config["num_key_value_heads"] = 1
    folder = write(tmp_path / "odd", config, random_tensors(config))
    (wide, _), (decoder, _) = load(folder), load(folder, quantize=name)
    weight = decoder.layers[0].attention.project.weight
    assert (weight.out_features, weight.in_features, weight.format_name) == (120, 72, name)
    assert distance(weight.dequantize(), wide.layers[0].attention.project.weight.dequantize()) < NEAR[name]
    assert distance(logits(decoder), logits(wide)) < NEAR[name]


class Live(TorchDispatchMode):
    """The bytes of all tensors that operations made and that are still there; the most there were. Not of `given`."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@dataclass(frozen=True)
class Stored:
    """A StoredTensor in memory."""

    name: str
    values: torch.Tensor
    storage: str = "F32"
    source: str = "memory"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.to(dtype, copy=True)

    def blocks(self) -> torch.Tensor:
        raise ValueError("not in blocks")


@pytest.mark.parametrize("config", [DENSE, MOE])
def test_the_model_is_never_there_twice(config: dict[str, Any]) -> None:
    """At most what is kept, and a few times the largest parameter in float32."""
    config = {**config, "num_hidden_layers": 8}
    tensors = random_tensors(config)
    _, model = find_model(config["architectures"])
    spec = model.read(Config(config))
    stored = {name: Stored(name, values) for name, values in tensors.items()}
    with Live(tensors.values()) as live:
        policy = choose_policy("float32", bindings=BINDINGS, quantize="int4")
        decoder = build_decoder(spec, model, load_parameters(stored, model, spec, policy), BINDINGS)
    kept, dense = live.now, sum(values.nbytes for values in tensors.values())
    largest = 512 * 128 * 4  # gate and up
    assert sum(policy.made.values()) <= kept < 0.3 * dense, "the count is of what is there"
    assert live.most < kept + 7 * largest < 0.6 * dense
    assert decoder.spec is spec
