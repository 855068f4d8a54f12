"""In a group of one; what several ranks make of their shares is held against the whole in ../test_group.py."""

import torch

from services.worker.kernels.registry import Facts, bind
from services.worker.quant.none import DenseWeight
from services.worker.quant.sharded import SummedWeight, VocabularyWeight

BINDINGS = bind(("torch",), Facts("cpu"))


def test_weights_describe_themselves() -> None:
    values = torch.randn(6, 4)
    summed, vocabulary = (
        SummedWeight(DenseWeight(values), BINDINGS),
        VocabularyWeight(DenseWeight(values), [0, 6], 0, BINDINGS),
    )
    for weight in (summed, vocabulary):
        assert (weight.out_features, weight.in_features, weight.num_bytes, weight.fused) == (6, 4, 96, None)
        assert weight.format_name == "none" and torch.equal(weight.dequantize(), values)


def test_a_group_of_one_has_all() -> None:
    values, x, ids = torch.randn(6, 4), torch.randn(3, 4), torch.tensor([5, 0])
    vocabulary = VocabularyWeight(DenseWeight(values), [0, 6], 0, BINDINGS)
    assert torch.equal(vocabulary.embed(ids), values[ids]) and torch.equal(vocabulary.linear(x), x @ values.T)
    summed = SummedWeight(DenseWeight(values), BINDINGS)
    assert torch.equal(summed.embed(ids), values[ids])
    torch.testing.assert_close(summed.linear(x, torch.ones(6)), x @ values.T + 1)


def test_shares_of_the_vocabulary_may_differ() -> None:
    """The second of two ranks, with three rows of seven, pads its logits for the gather."""
    gathered: list[torch.Size] = []

    class Recorded:
        def __call__(self, op: object) -> object:
            return lambda *tensors: gathered.append(tensors[-1].shape)

    weight = VocabularyWeight(DenseWeight(torch.randn(3, 4)), [0, 4, 7], 1, Recorded())  # type: ignore[arg-type]
    assert weight.linear(torch.randn(5, 4)).shape == (5, 7) and gathered == [torch.Size([10, 4])]
    assert weight.embed(torch.tensor([0, 3, 6]))[:2].eq(0).all(), "rows of the other rank"
