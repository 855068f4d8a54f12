import torch

from services.worker.kernels.packing.int4 import decode_int4, pack_int4, unpack_int4


def test_every_byte_comes_back() -> None:
    every = torch.arange(256, dtype=torch.uint8)[None]
    assert torch.equal(pack_int4(unpack_int4(every)), every)
    assert unpack_int4(torch.tensor([[0x1F]], dtype=torch.uint8)).tolist() == [[15, 1]], "the lower half is the first"


def test_groups_have_their_own_scale_and_zero() -> None:
    packed = pack_int4(torch.tensor([[3, 5, 7, 9]]))
    scales = torch.tensor([[2.0, 0.5]])
    assert decode_int4(packed, scales, None).tolist() == [[-10.0, -6.0, -0.5, 0.5]]
    zeros = torch.tensor([[1, 9]], dtype=torch.uint8)
    assert decode_int4(packed, scales, zeros).tolist() == [[4.0, 8.0, -1.0, 0.0]]
    assert decode_int4(packed, scales, zeros + 0.5).tolist() == [[3.0, 7.0, -1.25, -0.25]]
