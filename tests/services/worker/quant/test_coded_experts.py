import torch

from services.worker.kernels.ops.moe_int4 import moe_int4
from services.worker.quant.coded import Making
from services.worker.quant.coded_experts import Filling, takes_tiles
from services.worker.quant.w4a16 import FORMAT
from tests.services.worker.quant.loading import BINDINGS, as_if_by


def test_only_aiter_reads_tiles() -> None:
    for provider, wanted in (("aiter", True), ("triton", False)):
        assert (
            takes_tiles(moe_int4, Making(torch.float32, torch.device("cpu"), as_if_by(provider, "moe_int4"))) is wanted
        )


def test_stacks_are_filled_part_by_part() -> None:
    filling = Filling(2, Making(torch.float32, torch.device("cpu"), BINDINGS))
    parts = [[FORMAT.encode(torch.randn(3, 64)), FORMAT.encode(torch.randn(5, 64))] for _ in range(2)]
    for pair in parts:
        filling.add(*pair)
    codes = filling.codes
    assert codes.values.shape == (2, 8, 32) and codes.scales.shape == (2, 8, 1) and codes.zeros is not None
    for e, pair in enumerate(parts):
        assert torch.equal(codes.values[e], torch.cat([part.values for part in pair]))
        assert torch.equal(codes.scales[e], torch.cat([part.scales for part in pair]))
