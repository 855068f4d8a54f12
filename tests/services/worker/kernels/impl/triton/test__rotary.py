"""What the kernels that rotate heads share on the host; their device parts run with the kernels."""

import torch

from services.worker.kernels.impl.triton._rotary import limit_of


def test_only_8_bit_caches_have_a_limit() -> None:
    assert limit_of(torch.empty(1, dtype=torch.float8_e4m3fn)) == 448.0
    assert limit_of(torch.empty(1, dtype=torch.float8_e4m3fnuz)) == 240.0
    assert limit_of(torch.empty(1, dtype=torch.float16)) == limit_of(torch.empty(1)) == 0.0
