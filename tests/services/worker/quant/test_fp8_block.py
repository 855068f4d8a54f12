import torch

from services.worker.quant.coded import Making
from services.worker.quant.fp8_block import FORMAT
from services.worker.quant.scheme import BLOCK, GROUP, Numbers, Scheme
from tests.services.worker.quant.loading import BINDINGS, as_if_by

MAKING = Making(torch.float32, torch.device("cpu"), BINDINGS)


def test_matrices_are_filled_up_with_zeros() -> None:
    codes = FORMAT.encode(torch.randn(256, 256))
    part = codes._replace(values=codes.values[:200, :160])
    filled, below, beside = FORMAT.fill(part)
    assert (filled.values.shape, below, beside) == ((256, 256), 56, 96)
    wide = FORMAT.decode(filled)
    assert torch.equal(wide[:200, :160], FORMAT.decode(part)) and not wide[200:].any() and not wide[:, 160:].any()
    assert FORMAT.fill(codes) == (codes, 0, 0)


def test_only_blocks_of_128_with_activations_in_groups() -> None:
    weight, activation = Numbers("fp8", BLOCK, 128), Numbers("fp8", GROUP, 128)
    assert FORMAT.takes(Scheme("fp8", weight, activation))
    for other in (None, Numbers("fp8", "row"), Numbers("fp8", GROUP, 128, dynamic=False)):
        assert not FORMAT.takes(Scheme("fp8", weight, other))
    assert not FORMAT.takes(Scheme("fp8", Numbers("fp8", BLOCK, 64), activation))


def test_tiles_want_scales_by_column() -> None:
    codes, x = FORMAT.encode(torch.randn(256, 128) / 11), torch.randn(5, 128)
    plain = FORMAT.weight(codes, 128, None, MAKING)
    tiled = FORMAT.weight(codes, 128, None, MAKING._replace(bindings=as_if_by("aiter", "block_scaled_linear")))
    assert tiled.form.by_column and not plain.form.by_column  # type: ignore[attr-defined]
    torch.testing.assert_close(tiled.linear(x, torch.ones(256)), plain.linear(x, torch.ones(256)))
    assert torch.equal(tiled.dequantize(), FORMAT.decode(codes))
