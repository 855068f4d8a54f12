"""What AITER's Triton kernels for experts mean: pairs of token and expert sorted by expert, one product over all."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.packing.mx import decode_mxfp4


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
        # Triton compiles one type of bias only, which no interpreter finds out
        assert a.bias is None or a.bias.dtype == torch.float32
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
