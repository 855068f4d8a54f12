"""GPUs that floors are predicted for, and formats that models are stored in. Data only.

AMD's data sheets: dense products at peak, bandwidth at peak. Kernels commonly reach 75 to 85 % of the bandwidth, so a
floor is printed at the peak and at REACHED of it. The H200's figures were measured (benchmarks/peers.py).
"""

from typing import NamedTuple

from benchmarks import peers

REACHED = 0.8


class Machine(NamedTuple):
    name: str
    arch: str
    memory_gb: float
    bandwidth: float  # bytes per second
    flops: dict[str, float]  # by the type of the products; a type that is not here is computed in bf16


class Format(NamedTuple):
    """Bytes per element where matrices and KV are stored, and the type in which MLPs (experts) are multiplied."""

    name: str
    attention_bytes: float = 2.0
    mlp_bytes: float = 2.0
    kv_bytes: float = 2.0
    attention_type: str = "bf16"
    mlp_type: str = "bf16"


INT4_BYTES = 0.5 + 3 / 128  # a scale of 16 bits and a zero point of 8 for every 128 elements
MXFP4_BYTES = 4.25 / 8  # four bits, and eight of scale for every 32 elements

BF16 = Format("bf16")
FP8 = Format("fp8", 1.0, 1.0, 1.0, "fp8", "fp8")
MXFP4 = Format("MXFP4, fp8 KV", MXFP4_BYTES, MXFP4_BYTES, 1.0, "fp4", "fp4")
MXFP4_EXPERTS = Format("MXFP4 experts, fp8 KV", 2.0, MXFP4_BYTES, 1.0, "bf16", "fp4")

QUANTIZED = {  # by the name that `model.quantize` takes; KV stays in bf16
    "fp8": Format("fp8 weights", 1.0, 1.0, 2.0, "fp8", "fp8"),
    "fp8_block": Format("fp8 weights in blocks", 1.0, 1.0, 2.0, "fp8", "fp8"),
    "int8": Format("int8 weights", 1.0, 1.0, 2.0, "int8", "int8"),
    "int4": Format("int4 weights", INT4_BYTES, INT4_BYTES),
    "mxfp4": Format("MXFP4 weights", MXFP4_BYTES, MXFP4_BYTES),
}

H200 = Machine(peers.MACHINE, "sm_90", 141, peers.BANDWIDTH, {"bf16": peers.FLOPS})
MI300X = Machine("MI300X", "gfx942", 192, 5.3e12, {"bf16": 1307e12, "fp8": 2615e12})
MI325X = Machine("MI325X", "gfx942", 256, 6.0e12, {"bf16": 1307e12, "fp8": 2615e12})
MI350X = Machine("MI350X", "gfx950", 288, 8.0e12, {"bf16": 2307e12, "fp8": 4614e12, "fp4": 9228e12})
MI355X = Machine("MI355X", "gfx950", 288, 8.0e12, {"bf16": 2517e12, "fp8": 5033e12, "fp4": 10066e12})
AMD = (MI300X, MI325X, MI350X, MI355X)
