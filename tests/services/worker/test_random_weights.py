import pytest
import torch

from services.worker.quant.contract import StoredTensor
from services.worker.random_weights import draw_all

CPU = torch.device("cpu")
SHAPES = {"a.q_proj.weight": (64, 256), "a.k_proj.weight": (64, 256), "a.norm.weight": (256,), "a.q_proj.bias": (64,)}


@pytest.fixture
def tensors() -> dict[str, StoredTensor]:
    return draw_all(SHAPES, CPU)


def test_they_look_like_a_checkpoint(tensors: dict[str, StoredTensor]) -> None:
    assert {name: tensor.shape for name, tensor in tensors.items()} == SHAPES
    for tensor in tensors.values():
        assert tensor.dense(torch.bfloat16).dtype == torch.bfloat16
        assert tuple(tensor.dense(torch.float32).shape) == tensor.shape


def test_products_keep_their_size(tensors: dict[str, StoredTensor]) -> None:
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    product = x @ tensors["a.q_proj.weight"].dense(torch.float32).T
    assert 0.9 < float(product.std()) < 1.1
    assert tensors["a.norm.weight"].dense(torch.float32).eq(1).all()
    assert tensors["a.q_proj.bias"].dense(torch.float32).eq(0).all()


def test_a_name_gives_the_same_values_again_and_another_name_others(tensors: dict[str, StoredTensor]) -> None:
    first = tensors["a.q_proj.weight"].dense(torch.float32)
    assert torch.equal(first, draw_all(SHAPES, CPU)["a.q_proj.weight"].dense(torch.float32))
    assert not torch.equal(first, tensors["a.k_proj.weight"].dense(torch.float32))
    with pytest.raises(ValueError, match="not stored in blocks"):
        tensors["a.q_proj.weight"].blocks()
