import torch

from services.worker.layers.kv_cache import KvCache
from services.worker.models.spec import DecoderSpec, RopeSpec

SPEC = DecoderSpec(10, 8, 8, 3, 4, 2, 5, 1e-5, RopeSpec(1e4, 5), 64, False)


def test_layers_are_views_of_one_allocation() -> None:
    cache = KvCache(torch.zeros(KvCache.shape(SPEC, 6, 4)))
    assert len(cache.layers) == 3
    keys, values = cache.layers[1]
    assert keys.shape == values.shape == (6, 4, 2, 5) and keys.is_contiguous()
    keys[2] = 1.0
    values[3] = 2.0
    assert cache.storage[1, 0, 2].eq(1).all() and cache.storage[1, 1, 3].eq(2).all()
    assert cache.storage.count_nonzero() == 2 * 4 * 2 * 5


def test_copies_read_all_before_they_write() -> None:
    cache = KvCache(torch.arange(3 * 2 * 6 * 4 * 2 * 5, dtype=torch.float32).view(KvCache.shape(SPEC, 6, 4)))
    before = cache.storage.clone()
    cache.copy_blocks([0, 1, 0], [1, 2, 5])
    wanted = before[:, :, [0, 0, 1, 3, 4, 0]]
    assert torch.equal(cache.storage, wanted)


def test_copies_8_bit_floats() -> None:
    cache = KvCache(torch.ones(KvCache.shape(SPEC, 3, 4)).to(torch.float8_e4m3fn))
    cache.storage[:, :, 1] = 2.0
    cache.copy_blocks([1], [0])
    assert cache.storage.float().mean((0, 1, 3, 4, 5)).tolist() == [2.0, 2.0, 1.0]
