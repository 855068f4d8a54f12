"""RMS normalization by AITER: HIP kernels for 16-bit rows, CK in older releases."""

from services.worker.kernels.impl.aiter._norm import RMS_NORM, normed, refuses_norm
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Facts, Impl


def refuses(facts: Facts) -> str | None:
    return refuses_norm(facts, RMS_NORM)


IMPL = Impl(rms_norm, "aiter", normed, refuses)
