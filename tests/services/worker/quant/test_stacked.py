from dataclasses import dataclass
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from services.worker.kernels.packing.mx import decode_mxfp4, encode_mxfp4
from services.worker.quant.narrow import narrow
from services.worker.quant.stacked import unstack

GATE_UP = ("experts.{e}.gate.weight", "experts.{e}.up.weight")


@dataclass
class Whole:
    name: str
    values: torch.Tensor
    storage: str = "BF16"
    source: str = "some.safetensors"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.to(dtype, copy=True)

    def blocks(self) -> torch.Tensor:
        raise ValueError("not in blocks")


@dataclass
class Stack(Whole):
    def entry(self, index: int) -> torch.Tensor:
        return self.values[index]


def stacks(**values: torch.Tensor) -> dict[str, Any]:
    return {name: Stack(name, value) for name, value in values.items()}


def test_every_expert_gets_its_columns_and_biases() -> None:
    values, bias = torch.randn(3, 8, 10), torch.randn(3, 10)
    tensors = stacks(up=values, up_bias=bias, other=torch.ones(1))
    unstack(tensors, "up", GATE_UP)
    assert len(tensors) == 1 + 2 * 6 and "other" in tensors
    for e in range(3):
        for begin, part in enumerate(("gate", "up")):
            found = tensors[f"experts.{e}.{part}.weight"]
            assert found.shape == (5, 8) and found.storage == "BF16" and "some.safetensors" in found.source
            assert torch.equal(found.dense(torch.float32), values[e, :, begin::2].T)
            assert found.dense(torch.float32).is_contiguous()
            assert torch.equal(tensors[f"experts.{e}.{part}.bias"].dense(torch.float32), bias[e, begin::2])
    whole = stacks(down=values)
    unstack(whole, "down", ("experts.{e}.down.weight",))
    assert torch.equal(whole["experts.2.down.weight"].dense(torch.float32), values[2].T)


def test_mxfp4_is_decoded() -> None:
    packed, scales = encode_mxfp4(torch.randn(3, 10, 64))
    tensors = stacks(up_blocks=packed.view(3, 10, 2, 16), up_scales=scales)
    unstack(tensors, "up", GATE_UP)
    assert len(tensors) == 6
    found = tensors["experts.1.up.weight"]
    assert found.shape == (5, 64) and found.storage == "mxfp4"
    assert torch.equal(found.dense(torch.float32), decode_mxfp4(packed, scales)[1, 1::2])


def test_a_stack_that_is_not_there_changes_nothing() -> None:
    tensors = stacks(other=torch.ones(1))
    unstack(tensors, "up", GATE_UP)
    assert list(tensors) == ["other"]


def test_what_cannot_be_split_is_named() -> None:
    for tensors, text in (
        (stacks(up=torch.ones(3, 8, 9)), r'"up" of shape \[3, 8, 9\]'),
        (stacks(up=torch.ones(3, 8)), r'"up" of shape \[3, 8\]'),
        (stacks(up_bias=torch.ones(3, 8, 2)), '"up_bias" of shape'),
        (stacks(up_blocks=torch.ones(3, 8, 2, 16), up_scales=torch.ones(3, 8, 1)), '"up_blocks" of shape'),
        ({"up": Whole("up", torch.ones(3, 8, 8))}, '"up" can only be read as a whole'),
    ):
        with pytest.raises(ConfigError, match=text):
            unstack(tensors, "up", GATE_UP)


def test_a_ranks_share_of_a_coded_stack() -> None:
    """Also where it begins and ends within a group of 32."""
    packed, scales = encode_mxfp4(torch.randn(2, 12, 128))
    tensors = stacks(up_blocks=packed.view(2, 12, 4, 16), up_scales=scales)
    unstack(tensors, "up", GATE_UP)
    for part in (tensors["experts.1.gate.weight"], tensors["experts.1.up.weight"]):
        whole = part.dense(torch.float32)
        assert whole.shape == (6, 128)
        for rows, columns in (((0, 3), (32, 96)), ((2, 6), (0, 128)), ((1, 5), (40, 100))):
            share = narrow(narrow(part, 0, *rows), 1, *columns)
            assert torch.equal(share.dense(torch.float32), whole[slice(*rows), slice(*columns)])
