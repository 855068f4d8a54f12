import torch

from services.worker.layers.kv_cache import KvCache
from services.worker.layers.kv_scales import KvScales
from services.worker.memory import zeros

SHAPE, CPU = (2, 2, 5, 4, 3, 16), torch.device("cpu")


def test_wide_caches_have_none() -> None:
    assert KvScales().make(SHAPE, torch.bfloat16, CPU) == []


def test_each_layer_has_the_checkpoints_or_one() -> None:
    scales = KvScales(layers={1: (0.25, 0.5)}).make(SHAPE, torch.float8_e4m3fn, CPU)
    assert [(float(s.k), float(s.v)) for s in scales] == [(1.0, 1.0), (0.25, 0.5)]
    assert all(table.data_ptr() % 16 == 0 for scale in scales for table in scale)
    doubled = KvScales(layers={1: (0.25, 0.5)}).make(SHAPE, torch.float8_e4m3fnuz, CPU)
    assert (float(doubled[1].k), float(doubled[1].v)) == (0.5, 1.0)


def test_each_token_and_head_has_its_own_and_they_are_copied_with_their_block() -> None:
    own = KvScales(each=True)
    scales = own.make(SHAPE, torch.float8_e4m3fn, CPU)
    assert all(scale.each and scale.k.shape == (5, 4, 3) for scale in scales)
    cache = KvCache(zeros(SHAPE, torch.float8_e4m3fn, CPU), scales)
    for number, layer in enumerate(cache.layers):
        assert layer.scale is not None
        layer.scale.k[2], layer.scale.v[2] = number + 1.0, number + 10.0
    cache.copy_blocks([2], [4])
    for number, layer in enumerate(cache.layers):
        assert layer.scale is not None
        assert layer.scale.k[4].unique().tolist() == [number + 1.0]
        assert layer.scale.v[4].unique().tolist() == [number + 10.0]
        assert not layer.scale.k[3].any()
