"""Columns are put in order, and normed as the op rms_norm says."""

import torch

from services.worker.kernels.impl.triton import _narrow_planes
from services.worker.kernels.ops.rms_norm import rms_norm


def test_every_fourth_column_of_a_step_comes_first(device: torch.device) -> None:
    x = torch.arange(2 * 192.0, device=device).view(2, 192)
    planes = _narrow_planes.launch(x, None, 64)
    assert torch.equal(planes, x.view(2, 3, 16, 4).transpose(2, 3).reshape(2, 192))
    norm = torch.linspace(0.5, 1.5, 192, device=device)
    normed = rms_norm.meaning(x, norm, 1e-5)
    planes = _narrow_planes.launch(x, (norm, 1e-5), 64)
    torch.testing.assert_close(planes, normed.view(2, 3, 16, 4).transpose(2, 3).reshape(2, 192))
