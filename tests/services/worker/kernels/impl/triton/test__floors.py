"""The keys that the search of floors works on."""

import torch
import triton
import triton.language as tl

from services.worker.kernels.impl.triton import _floors


@triton.jit
def keys_of(values_ptr, keys_ptr, back_ptr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, COUNT)
    key = _floors.key_of(tl.load(values_ptr + index))
    tl.store(keys_ptr + index, key)
    tl.store(back_ptr + index, _floors.value_of(key))


def test_keys_order_as_the_numbers_do_and_lead_back(device: torch.device) -> None:
    tiny = torch.finfo(torch.float32).smallest_normal
    values = torch.tensor([-torch.inf, -3.4e38, -7.0, -1.0, -tiny, -0.0, 0.0, 1e-44, tiny, 1.0, 1.0000001, 7.0])
    values = torch.cat((values, torch.tensor([3.4e38, torch.inf] * 2))).to(device)
    keys = torch.empty(16, dtype=torch.int32, device=device)
    back = torch.empty_like(values)
    keys_of[(1,)](values, keys, back, 16)
    assert keys[:14].diff().min() > 0
    assert keys[0] == _floors.LOWEST.value
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))
