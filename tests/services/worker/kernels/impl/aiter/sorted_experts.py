"""What AITER's Triton kernels for experts mean: pairs of token and expert sorted by expert, one product over all."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.packing.int4 import unpack_int4
from services.worker.kernels.packing.mx import decode_mxfp4, decode_mxfp8, encode_mxfp8


class SortedExperts:
    def routing(self, a: Any) -> tuple[Any, Tensor, Tensor]:
        """Weights are the softmax over those chosen; a token's experts are sorted by number."""
        assert a.logits.dtype == torch.float32 and a.logits.dim() == 2 and a.logits.is_contiguous()
        count, num_experts = a.logits.shape
        values, experts = a.logits.topk(a.n_expts_act)
        assert values.isfinite().all(), "an expert that nobody chose"
        experts, order = experts.sort(1)
        weights = values.softmax(1).gather(1, order).flatten()
        by_expert = experts.flatten().argsort(stable=True)
        hist = torch.bincount(experts.flatten(), minlength=num_experts)
        data = SimpleNamespace(gate_scal=weights[by_expert], hist=hist, tokens=count, top_k=a.n_expts_act)
        return data, by_expert.int(), by_expert.argsort().int()

    def moe_gemm_a16w4(self, a: Any) -> Tensor:
        """w: [E, K / 2, N], K next to each other; of a gated product the columns are gate and up in turn."""
        assert a.x.dtype == torch.bfloat16 and a.x_scales is None and a.w.stride(1) == a.w_scales.stride(1) == 1
        assert a.w.dtype == a.w_scales.dtype == torch.uint8
        # Triton compiles one type of bias only, which no interpreter finds out
        assert a.bias is None or a.bias.dtype == torch.float32
        _check_pairs(a)
        data, rows = a.routing_data, a.x
        if a.gather_indx is not None:
            rows = a.x[a.gather_indx.long() // data.top_k]
        assert len(rows) == data.tokens * data.top_k and a.out_dtype == torch.bfloat16
        found = []
        for expert, part in enumerate(rows.float().split(data.hist.tolist())):
            y = part @ decode_mxfp4(a.w[expert].T, a.w_scales[expert].T).T
            found.append(y if a.bias is None else y + a.bias[expert].float())
        y = torch.cat(found)
        if a.apply_swiglu:
            gate, up = y[:, ::2], y[:, 1::2]
            if a.limit is not None:
                gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
            y = gate * torch.sigmoid(a.alpha * gate) * (up + bool(a.swiglu_add_residual))
        y = (y if a.gammas is None else y * a.gammas[:, None]).to(a.out_dtype)
        if a.scatter_indx is None:
            return y
        return y[a.scatter_indx.long()].view(data.tokens, data.top_k, -1).float().sum(1).to(a.out_dtype)

    def downcast_to_mxfp(self, a: Any) -> tuple[Tensor, Tensor]:
        assert a.src_tensor.dtype == torch.bfloat16 and a.axis == -1 and a.src_tensor.is_contiguous()
        assert a.out_quant_type == torch.float8_e4m3fn
        return encode_mxfp8(a.src_tensor, a.out_quant_type)

    def moe_gemm_a8w8(self, a: Any) -> Tensor:
        """w: [E, K, N], K next to each other."""
        assert a.x.dtype == a.w.dtype == torch.float8_e4m3fn and a.w.stride(1) == a.w_scales.stride(1) == 1
        assert a.x_scales.dtype == a.w_scales.dtype == torch.uint8
        _check_pairs(a)
        data, rows = a.routing_data, decode_mxfp8(a.x, a.x_scales)
        if a.gather_indx is not None:
            rows = rows[a.gather_indx.long() // data.top_k]
        parts = zip(a.w, a.w_scales, rows.split(data.hist.tolist()), strict=True)
        y = torch.cat([part @ decode_mxfp8(w.T, scales.T).T for w, scales, part in parts])
        y = (y if a.gammas is None else y * a.gammas[:, None]).to(a.out_dtype)
        if a.scatter_indx is None:
            return y
        return y[a.scatter_indx.long()].view(data.tokens, data.top_k, -1).float().sum(1).to(a.out_dtype)

    def get_optimal_moe_config(self, a: Any) -> dict[str, int]:
        assert a.use_int4_w4a16
        return {"BLOCK_SIZE_M": 16 if a.M < 8 else 4}

    def moe_align_block_size_triton(self, a: Any) -> None:
        """Pairs by expert; a tile has one expert, and beyond its pairs a number that is no pair's."""
        flat, tile = a.topk_ids.flatten(), a.block_size
        assert a.topk_ids.dtype == torch.int32 and a.topk_ids.is_contiguous()
        assert (a.sorted_token_ids == len(flat)).all(), "nobody else fills it"
        place = 0
        for expert in range(a.num_experts):
            pairs = (flat == expert).nonzero().flatten()
            tiles = -(-len(pairs) // tile)
            a.sorted_token_ids[place : place + len(pairs)] = pairs
            a.expert_ids[place // tile : place // tile + tiles] = expert
            place += tiles * tile
        a.num_tokens_post_pad[0] = place

    def moe_op_fused_moe(self, a: Any) -> None:
        """C[pair] = A[pair // top_k] @ B[expert].T, times the pair's weight if asked for."""
        assert {x.dtype for x in (a.topk_ids, a.sorted_token_ids, a.expert_ids, a.num_tokens_post_padded)} == {
            torch.int32
        }
        assert a.topk_weights.dtype == torch.float32
        assert a.use_int4_w4a16 and not a.use_fp8_w8a8 and not a.use_int8_w8a16 and a.A_scale is None
        assert (
            a.block_shape[0] == 0
            and a.A.is_contiguous()
            and str(a.compute_type) == {"torch.bfloat16": "bf16"}.get(str(a.A.dtype), "fp16")
        )
        tile, out = a.config["BLOCK_SIZE_M"], a.C.view(-1, a.C.shape[2])
        assert a.block_shape[1] == a.B.shape[2] * 2 // a.B_scale.shape[2]
        assert len(a.A) * a.top_k == len(out) == a.topk_ids.numel()
        weights: dict[int, Tensor] = {}
        for begin in range(0, int(a.num_tokens_post_padded), tile):
            expert = int(a.expert_ids[begin // tile])
            if expert not in weights:
                weights[expert] = _whole(a.B[expert], a.B_scale[expert], a.B_zp if a.B_zp is None else a.B_zp[expert])
            pairs = a.sorted_token_ids[begin : begin + tile].long()
            pairs = pairs[pairs < len(out)]
            product = a.A[pairs // a.top_k].float() @ weights[expert].to(a.A.dtype).float().T
            factors = a.topk_weights.flatten()[pairs, None] if a.mul_routed_weight else 1.0
            out[pairs] = (product * factors).to(out.dtype)


def _check_pairs(a: Any) -> None:
    """As its own callers have them: compiled for others, too, but nobody has tried."""
    assert all(pairs is None or pairs.dtype == torch.int32 for pairs in (a.gather_indx, a.scatter_indx))
    assert a.gammas is None or a.gammas.dtype == torch.float32


def _whole(numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Decoded, one expert; zeros: two rows to a byte."""
    group = numbers.shape[1] * 2 // scales.shape[1]
    offsets = 8.0 if zeros is None else torch.stack((zeros & 15, zeros >> 4), 1).flatten(0, 1)
    if isinstance(offsets, Tensor):
        offsets = offsets.float().repeat_interleave(group, 1)
    return (unpack_int4(numbers).float() - offsets) * scales.float().repeat_interleave(group, 1)
