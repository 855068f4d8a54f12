import torch

from services.worker.kernels.ops.add_linear import add_linear


def test_adds_in_place() -> None:
    for dtype, tolerance in add_linear.tolerances.items():
        for case in add_linear.cases:
            residual, x, weight, bias = case.make(dtype)
            wanted = residual.double() + (x.double()[:, None, :] * weight.double()[None]).sum(-1)
            if bias is not None:
                wanted += bias.double()
            assert add_linear.meaning(residual, x, weight, bias) is None
            assert residual.dtype == dtype
            torch.testing.assert_close(
                residual.double(), wanted, rtol=tolerance.relative, atol=tolerance.absolute, msg=case.name
            )
