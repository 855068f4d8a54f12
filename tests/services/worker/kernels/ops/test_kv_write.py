import torch

from services.worker.kernels.ops.kv_write import KvScale, kv_write, make_kv_case, store_kv


def test_writes_these_slots_and_no_others() -> None:
    for dtype in kv_write.tolerances:
        for case in kv_write.cases:
            k, v, k_cache, v_cache, slots, kv_scale = case.make(dtype)
            wanted = k_cache.clone(), v_cache.clone()
            size = k_cache.shape[1]
            for token, slot in enumerate(slots.tolist()):
                for x, cache, scale in zip((k, v), wanted, kv_scale or (1.0, 1.0), strict=True):
                    x, scale = x[token].float(), float(scale)
                    cache[slot // size, slot % size] = x if kv_scale is None else (x / scale).clamp(-448, 448)
            kv_write.meaning(k, v, k_cache, v_cache, slots, kv_scale)
            for cache, right in zip((k_cache, v_cache), wanted, strict=True):
                assert torch.equal(cache.float(), right.float()), case.name


def test_a_value_beyond_the_largest_is_stored_as_the_largest() -> None:
    stored = store_kv(torch.tensor([1e9, -3.0, 0.5]), torch.float8_e4m3fn, torch.tensor([0.001]))
    assert stored.float().tolist() == [448.0, -448.0, 448.0]
    assert store_kv(torch.tensor([1e-3]), torch.float8_e4m3fn, torch.tensor([0.001])).float().tolist() == [1.0]


def test_every_token_and_head_has_its_own_scale() -> None:
    k, v, k_cache, v_cache, slots, scale = make_kv_case(20, 3, 16, 2, 64, fp8=2).make(torch.float32)
    assert scale.each and not KvScale(torch.ones(1), torch.ones(1)).each
    k[0, 1] = 0
    before = [table.clone() for table in scale]
    kv_write.meaning(k, v, k_cache, v_cache, slots, scale)
    for x, cache, table, old in zip((k, v), (k_cache, v_cache), scale, before, strict=True):
        rows, scales = cache.view(-1, 2, 64).float(), table.view(-1, 2)
        read = rows[slots] * scales[slots][..., None]
        largest = x.abs().amax(-1)
        torch.testing.assert_close(scales[slots], largest.clamp(min=1e-10) / 448)
        assert ((read - x).abs() <= largest[..., None] / 28).all(), "half a step of the largest numbers"
        others = torch.ones(48, dtype=torch.bool).index_fill_(0, slots, False)
        assert torch.equal(scales[others], old.view(-1, 2)[others])
