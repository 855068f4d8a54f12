import torch

from services.worker.quant.coded import Making
from services.worker.quant.scheme import ROW, TENSOR, Numbers, Scheme
from services.worker.quant.w8a8 import FORMAT
from tests.services.worker.quant.loading import BINDINGS, as_if_by


def test_int8_is_never_in_tiles() -> None:
    bindings = as_if_by("aiter", "row_scaled_linear")
    matrix, x = torch.randn(64, 128) / 11, torch.randn(4, 128)
    for making in (Making(torch.float32, torch.device("cpu"), b) for b in (bindings, BINDINGS)):
        weight = FORMAT.weight(FORMAT.encode(matrix), 128, None, making)
        assert weight._product.values.dim() == 2  # type: ignore[attr-defined]
        assert float((weight.linear(x) - x @ matrix.T).norm() / (x @ matrix.T).norm()) < 0.02


def test_takes_symmetric_numbers_with_scales_per_token() -> None:
    weight, token = Numbers("int8", ROW), Numbers("int8", ROW)
    assert FORMAT.takes(Scheme("compressed-tensors", weight, token))
    for other in (
        None,
        Numbers("int8", ROW, symmetric=False),
        Numbers("int8", TENSOR),
        Numbers("int8", ROW, dynamic=False),
    ):
        assert not FORMAT.takes(Scheme("compressed-tensors", weight, other))
