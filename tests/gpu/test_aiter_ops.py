"""AITER's kernels against the ops' meanings on an AMD GPU, case by case; also of ops that no model calls yet."""

import pytest
import torch

from benchmarks.gate import check
from services.worker.kernels.registry import all_ops, find_impls

IMPLS, REASON = find_impls("aiter")
DEVICE = torch.device("cuda", 0)


def test_an_amd_host_has_the_provider() -> None:
    """And no other has: a test of its ops that finds none must not look like one that passed."""
    assert bool(IMPLS) == bool(torch.version.hip), REASON


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", all_ops())
def test_is_the_meaning(name: str, dtype: torch.dtype) -> None:
    if name in IMPLS and not all_ops()[name].in_cache:  # pages have tests of their own, which know their layout
        check(IMPLS[name], DEVICE, dtype)
