"""Every case of the attention kernels once, for a checker of memory accesses and races:

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize

Launches are compared with the op's meaning too, so that a run without findings has computed something.
"""

import dataclasses
from typing import Any

import torch

from services.worker.kernels.impl.triton import paged_attention as attention
from services.worker.kernels.impl.triton import rope_kv_write as rotary
from services.worker.kernels.registry import Impl


def on_gpu(value: Any) -> Any:
    """A copy on the device of all tensors in tensors, tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: on_gpu(getattr(value, name)) for name in names})
    if isinstance(value, tuple):
        parts = [on_gpu(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def run(impl: Impl[Any], dtype: torch.dtype) -> None:
    tolerance = impl.op.tolerances[dtype]
    for case in impl.op.cases:
        given = [on_gpu(argument) for argument in case.make(dtype)]
        got, wanted = impl.run(*given), impl.op.meaning(*case.make(dtype))
        torch.testing.assert_close(
            got.cpu().float(), wanted.float(), rtol=tolerance.relative, atol=2 * tolerance.absolute, msg=case.name
        )
        print(f"{impl.op.name} {case.name}", flush=True)


if __name__ == "__main__":
    for implementation in (attention.IMPL, rotary.IMPL):
        run(implementation, torch.bfloat16)
    torch.cuda.synchronize()
