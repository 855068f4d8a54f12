"""How every op test holds an op against its formula: all cases, all dtypes, the op's own tolerances."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.kernels.registry import Op

Check = Callable[[Op[Any], Callable[..., Any]], None]


@pytest.fixture
def check() -> Check:
    """`check(op, formula)`: `formula` takes the op's arguments in float64 and returns what the op should."""

    def run(op: Op[Any], formula: Callable[..., Any]) -> None:
        for dtype, tolerance in op.tolerances.items():
            for case in op.cases:
                arguments = case.make(dtype)
                wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
                got, wanted = op.meaning(*arguments), formula(*wide)
                pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
                for left, right in pairs:
                    assert left.dtype == dtype
                    torch.testing.assert_close(
                        left.double(),
                        right,
                        rtol=tolerance.relative,
                        atol=tolerance.absolute,
                        msg=lambda text, name=case.name, dtype=dtype: f"{op.name}/{name}/{dtype}: {text}",
                    )

    return run
