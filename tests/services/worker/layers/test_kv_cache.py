import dataclasses
import math

import pytest
import torch

from common.errors import ConfigError
from services.worker.groups import Storage, lay_out
from services.worker.kernels.layout import SHUFFLED, in_order, shuffled
from services.worker.kernels.ops.kv_write import KvScale
from services.worker.layers.kv_cache import GroupedCache, KvCache, storage_dtype
from services.worker.models.caches import PagedKv, RecurrentState, StateTensor
from services.worker.models.spec import DecoderSpec, RopeSpec

SPEC = DecoderSpec(10, 8, 8, 3, 4, 2, 5, 1e-5, RopeSpec(1e4, 5), 64, False)


def test_layers_are_views_of_one_allocation() -> None:
    cache = KvCache(torch.zeros(KvCache.shape(SPEC, 6, 4)))
    assert len(cache.layers) == 3
    keys, values, scale = cache.layers[1]
    assert scale is None and keys.shape == values.shape == (6, 4, 2, 5) and keys.is_contiguous()
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_copies_are_right_in_any_layout(dtype: torch.dtype) -> None:
    """Numbers that are written through one layout's views are copied as what they are."""
    spec = dataclasses.replace(SPEC, head_dim=32)
    size = math.prod(KvCache.shape(spec, 3, 16))
    given = torch.arange(size).remainder(97).to(dtype).view(KvCache.shape(spec, 3, 16))
    cache = KvCache(torch.zeros_like(given), layout=SHUFFLED)
    for layer, (keys, values) in zip(cache.layers, given, strict=True):
        for stored, new in zip(layer[:2], shuffled(keys, values), strict=True):
            stored.copy_(new)
    cache.copy_blocks([2, 0], [0, 1])
    for layer, (keys, values) in zip(cache.layers, given[:, :, [2, 0, 2]], strict=True):
        for stored, wanted in zip(in_order(*layer[:2]), (keys, values), strict=True):
            assert torch.equal(stored.float(), wanted.float())


def test_8_bit_storage_has_a_scale_in_each_layer() -> None:
    storage = torch.zeros(KvCache.shape(SPEC, 1, 4)).to(torch.float8_e4m3fn)
    for layer in KvCache(storage).layers:
        assert layer.scale is not None
        for factor in layer.scale:
            assert factor.dtype == torch.float32 and factor.tolist() == [1.0] and factor.data_ptr() % 16 == 0
    scales = [KvScale(torch.tensor([0.5 + i]), torch.tensor([2.0])) for i in range(3)]
    assert [layer.scale for layer in KvCache(storage, scales).layers] == scales
    with pytest.raises(ValueError, match="zip"):
        KvCache(storage, scales[:2])


def test_the_stored_dtype_is_the_activations_or_the_8_bit_float_of_the_gpu() -> None:
    for arch in ("", "sm_80", "gfx942"):
        assert storage_dtype("auto", torch.bfloat16, arch) == torch.bfloat16
    for arch in ("", "sm_89", "sm_90", "sm_120", "gfx950", "gfx90a"):
        assert storage_dtype("fp8", torch.bfloat16, arch) == torch.float8_e4m3fn
    assert storage_dtype("fp8", torch.float32, "gfx942") == torch.float8_e4m3fnuz
    with pytest.raises(ConfigError, match=r'^kv.dtype is "fp8", which GPUs older than sm_89 cannot do; this .* sm_80$'):
        storage_dtype("fp8", torch.bfloat16, "sm_80")


def test_layers_of_groups_that_share_a_pool_share_its_memory() -> None:
    """A page is one group's or the other's: with its number, both would be read and written."""
    kept = [PagedKv(2, 8, 8), PagedKv(2, 8, 8, 6), PagedKv(2, 8, 8, 6), PagedKv(2, 8, 8)]
    storage, cpu = Storage(torch.float32, torch.float32), torch.device("cpu")
    cache = GroupedCache(lay_out(kept, 4, storage), (5,), 4, storage, cpu)
    assert cache.groups == (0, 1, 1, 0) and cache.num_blocks == 5
    assert cache.nbytes == 2 * 2 * 5 * 4 * 2 * 8 * 4, "two places"
    first, second, third, fourth = (layer.keys.data_ptr() for layer in cache.layers)
    assert first == second != third == fourth


def test_pools_of_unlike_blocks_are_copied_by_themselves() -> None:
    state = RecurrentState((StateTensor((3, 2)), StateTensor((4,), torch.float64)))
    kept = [PagedKv(1, 6, 2), state, state, PagedKv(1, 4, 0)]
    storage, cpu = Storage(torch.float8_e4m3fn, torch.bfloat16), torch.device("cpu")
    cache = GroupedCache(lay_out(kept, 4, storage, 4), (5, 3), 4, storage, cpu)
    assert (cache.blocks_of(0), cache.blocks_of(1), cache.groups) == (5, 3, (0, 1, 1, 0))
    (keys, values, scale), (matrix, vector), _, (latent, nothing, _) = cache.layers
    assert keys.shape == (5, 4, 1, 6) and values.shape == (5, 4, 1, 2) and scale is not None
    assert latent.shape == (5, 4, 1, 4) and nothing.numel() == 0
    assert (matrix.dtype, matrix.shape, vector.dtype, vector.shape) == (
        torch.bfloat16,
        (3, 3, 2),
        torch.float64,
        (3, 4),
    )
    matrix[1], vector[1] = 2.0, 3.0
    keys[1] = torch.ones(4, 1, 6).to(keys.dtype)
    cache.copy_blocks([1], [2], pool=1)
    assert matrix[2].eq(2).all() and vector[2].eq(3).all() and not keys[2].float().any()
    cache.copy_blocks([1], [2])
    assert keys[2].float().eq(1).all() and not matrix[0].any()
