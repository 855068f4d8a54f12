"""Half-width weights in the blocked layouts of the CPU matrix libraries that come with torch.

bf16 through oneDNN (AMX or AVX512 bf16 units; x is rounded to bf16, sums are fp32) and fp16 through FBGEMM (x stays
fp32, the weight is widened in registers; needs AVX2). FBGEMM limits values to fp16's range, so larger ones are refused.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from services.worker.quant.contract import StoredTensor, Weight
from services.worker.quant.none import fuse

PACK_ROWS = 16  # x rows that oneDNN lays the weight out for; one layout serves all sizes within a few percent
FP16_MAX = torch.finfo(torch.float16).max


class PackedBf16Weight:
    """`packed`: oneDNN's layout of [out_features, in_features]."""

    format_name = "bf16-packed"
    fused = None

    def __init__(self, dense: torch.Tensor) -> None:
        self.out_features, self.in_features = dense.shape
        self.num_bytes = dense.numel() * 2
        self._packed = torch.ops.mkldnn._reorder_linear_weight(dense, PACK_ROWS)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(torch.bfloat16), self._packed, None, "none", [], ""
        ).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.dequantize())

    def dequantize(self) -> torch.Tensor:
        dense: torch.Tensor = self._packed.to_dense()
        return dense.to(torch.float32)


class PackedBf16Format:
    name = "bf16-packed"

    def unavailable(self) -> str | None:
        if not torch._C._has_mkldnn:
            return "this build of torch has no oneDNN"
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "this CPU has no vector units that oneDNN can compute bf16 with"
        if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
            return "this CPU has neither AMX nor AVX512 bf16 instructions"
        return None

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        return None

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        return PackedBf16Weight(fuse(parts, torch.bfloat16))


class PackedFp16Weight:
    """Keeps FBGEMM's fp16 panels of [out_features, in_features]."""

    format_name = "fp16-packed"
    fused = None

    def __init__(self, dense: torch.Tensor) -> None:
        self.out_features, self.in_features = dense.shape
        self.num_bytes = dense.numel() * 2
        self._packed = torch.ops.quantized.linear_prepack_fp16(dense, None)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self._packed).to(x.dtype)
        return y if bias is None else y.add_(bias)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.dequantize())

    def dequantize(self) -> torch.Tensor:
        dense: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return dense.float()


class PackedFp16Format:
    name = "fp16-packed"

    def unavailable(self) -> str | None:
        if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            return "this CPU has no AVX2"
        has_op = hasattr(torch.ops.quantized, "linear_prepack_fp16")
        if not has_op or "fbgemm" not in torch.backends.quantized.supported_engines:
            return "this build of torch has no FBGEMM"
        return None

    def refuses(self, parts: Sequence[StoredTensor]) -> str | None:
        for part in parts:
            # Everything but F32 and BF16 was made of fp16 scales times small integers, or is fp16 itself.
            if part.storage in ("F32", "F64", "BF16") and float(part.dense(torch.float32).abs().amax()) > FP16_MAX:
                return f"{part.name} holds values beyond fp16's range"
        return None

    def make(self, parts: Sequence[StoredTensor]) -> Weight:
        return PackedFp16Weight(fuse(parts, torch.float32))
