import torch

from services.worker.kernels.ops.kv_write import kv_write


def test_writes_these_slots_and_no_others() -> None:
    for dtype in kv_write.tolerances:
        for case in kv_write.cases:
            k, v, k_cache, v_cache, slots = case.make(dtype)
            wanted = k_cache.clone(), v_cache.clone()
            size = k_cache.shape[1]
            for token, slot in enumerate(slots.tolist()):
                wanted[0][slot // size, slot % size] = k[token]
                wanted[1][slot // size, slot % size] = v[token]
            kv_write.meaning(k, v, k_cache, v_cache, slots)
            assert torch.equal(k_cache, wanted[0]) and torch.equal(v_cache, wanted[1]), case.name
