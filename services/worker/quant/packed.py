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
    """`packed`: FBGEMM's fp16 panels of [out_features, in_features], wrapped in a tensor."""

    format_name = "fp16-packed"

    def __init__(self, dense: torch.Tensor) -> None:
        self.out_features, self.in_features = dense.shape
        self.num_bytes = dense.numel() * 2
        self._packed = torch.ops._quantized.wrapped_fbgemm_pack_gemm_matrix_fp16(dense)
        self._no_bias = torch.zeros(self.out_features)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        added = self._no_bias if bias is None else bias.float()
        y: torch.Tensor = torch.ops._quantized.wrapped_fbgemm_linear_fp16_weight(
            x.float(), self._packed, added, self.out_features
        )
        return y.to(x.dtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.dequantize())

    def dequantize(self) -> torch.Tensor:
        return self.linear(torch.eye(self.in_features)).t().contiguous()


class PackedFp16Format:
    name = "fp16-packed"

    def unavailable(self) -> str | None:
        if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
            return "this CPU has no AVX2"
        if "fbgemm" not in torch.backends.quantized.supported_engines:
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
