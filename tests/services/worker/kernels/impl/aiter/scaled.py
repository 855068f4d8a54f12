"""What AITER's functions for scaled numbers, experts, routing and latent attention do, written from its documentation.

Plain loops and index arithmetic, nothing of the ops' meanings: an argument in another form than AITER's is an error or
another result. Enumerations are strings.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
LARGEST = {torch.float8_e4m3fnuz: 240.0, torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unshuffled(weight: Tensor, rows: int = 16) -> Tensor:
    """[N, K] from the 16x16 (or 32x16) order of memory, number by number."""
    (count, width), chunk = weight.shape, 16 // weight.element_size()
    n, k = torch.arange(count)[:, None], torch.arange(width)[None]
    place = ((n // rows * (width // chunk) + k // chunk) * rows + n % rows) * chunk + k % chunk
    return weight.reshape(-1)[place]


def unshuffled_scales(scales: Tensor, rows: int, columns: int) -> Tensor:
    """float32 [rows, columns] from e8m0 tiles of 32 by 8 in memory padded to [multiple of 256, multiple of 8]."""
    assert scales.shape[0] % 256 == 0 and scales.shape[1] % 8 == 0
    m, g = torch.arange(rows)[:, None], torch.arange(columns)[None]
    tile = m // 32 * (scales.shape[1] // 8) + g // 8
    inside = g % 4 * 64 + m % 16 * 4 + g % 8 // 4 * 2 + m % 32 // 16
    exponents = scales.view(torch.uint8).reshape(-1)[tile * 256 + inside].float()
    return torch.exp2(exponents - 127)


def unpacked(numbers: Tensor, scales: Tensor) -> Tensor:
    """float32 from pairs of e2m1, the lower half byte first, and a scale per 32."""
    codes = numbers.view(torch.uint8).long()
    table = torch.tensor(E2M1)
    values = torch.stack((table[codes % 16], table[codes // 16]), -1).flatten(-2)
    return values * scales.repeat_interleave(32, -1)


def nearest_e2m1(values: Tensor) -> Tensor:
    """Codes of the nearest, of two equally near the even one."""
    distance = (values.abs()[..., None] - torch.tensor(E2M1[:8])).abs() + torch.tensor((0, 1) * 4) * 1e-6
    return distance.argmin(-1) + 8 * torch.signbit(values)


def blocks(scales: Tensor, down: int, across: int) -> Tensor:
    return scales.repeat_interleave(down, -2).repeat_interleave(across, -1)


def by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is given a call's arguments as one object, those that were left out as None."""
    names = list(inspect.signature(function).parameters)[1:]

    @wraps(function)
    def call(self: "Scaled", a: Any) -> Any:
        return function(self, **{name: getattr(a, name) for name in names})

    return call


class Scaled:
    """One architecture's functions."""

    def __init__(self, arch: str, exact: bool = False) -> None:
        self.arch, self.fp8 = arch, FP8[arch]
        self.floats = (torch.bfloat16, torch.float16, *((torch.float32,) if exact else ()))

    def _float(self, *tensors: Tensor) -> None:
        """Numbers that are computed with: of one dtype, which kernels are built for."""
        dtypes = {x.dtype for x in tensors}
        assert len(dtypes) == 1 and dtypes <= {*self.floats}, f"AITER: one of {self.floats}, not {dtypes}"

    def _scales(self, *scales: Tensor | None) -> None:
        """Read as float32, whatever they are."""
        assert all(scale is None or scale.dtype == torch.float32 for scale in scales), "AITER: scales of float32"

    def _numbers(self, x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        limit = LARGEST[dtype]
        scaled = (x.float() / scales).clamp(-limit, limit)
        return scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)

    def _check_eight_bits(self, *operands: Tensor) -> None:
        assert {operand.dtype for operand in operands} in ({self.fp8}, {torch.int8}), operands[0].dtype
        assert all(operand.is_contiguous() for operand in operands)

    @by_name
    def per_token_quant_hip(self, x: Tensor, quant_dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        self._float(x)
        assert x.is_contiguous() and quant_dtype in (self.fp8, torch.int8), quant_dtype
        return self._by_token(x, quant_dtype)

    def _by_token(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scales = x.float().abs().amax(-1, keepdim=True) / LARGEST[dtype]
        return self._numbers(x, scales, dtype), scales

    @by_name
    def per_tensor_quant_hip(self, x: Tensor, quant_dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        self._float(x)
        assert x.is_contiguous() and quant_dtype in (self.fp8, torch.int8), quant_dtype
        scale = x.float().abs().amax().view(1) / LARGEST[quant_dtype]
        return self._numbers(x, scale, quant_dtype), scale

    @by_name
    def per_group_quant_hip(
        self, x: Tensor, quant_dtype: torch.dtype = torch.int8, group_size: int = 128, transpose_scale: bool = False
    ) -> tuple[Tensor, Tensor]:
        self._float(x)
        assert x.is_contiguous() and quant_dtype == self.fp8 and group_size in (32, 64, 128)
        return self._by_group(x, group_size, transpose_scale)

    def _by_group(self, x: Tensor, group: int, transpose: bool) -> tuple[Tensor, Tensor]:
        scales = torch.stack([part.float().abs().amax(-1) for part in x.split(group, -1)], -1) / LARGEST[self.fp8]
        numbers = self._numbers(x, blocks(scales, 1, group), self.fp8)
        return numbers, scales.T.reshape(scales.shape) if transpose else scales

    @by_name
    def per_1x32_mx_quant_hip(self, x: Tensor, quant_dtype: Any = None, shuffle: bool = False) -> tuple[Tensor, Tensor]:
        self._float(x)
        assert self.arch == "gfx950" and quant_dtype == torch.float4_e2m1fn_x2 and shuffle and x.is_contiguous()
        return self._by_mx(x)

    def _by_mx(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = len(x), x.shape[1] // 32
        wide = x.float()
        exponents = (wide.unflatten(-1, (-1, 32)).abs().amax(-1).clamp(min=1e-10) / 6).log2().ceil() + 127
        codes = nearest_e2m1(wide / torch.exp2(exponents - 127).repeat_interleave(32, -1))
        numbers = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        # what is not there is not written
        scales = torch.full((-(-rows // 256) * 256, -(-columns // 8) * 8), 0xAB, dtype=torch.uint8)
        m, g = torch.arange(rows)[:, None], torch.arange(columns)[None]
        tile = m // 32 * (scales.shape[1] // 8) + g // 8
        place = tile * 256 + g % 4 * 64 + m % 16 * 4 + g % 8 // 4 * 2 + m % 32 // 16
        scales.view(-1)[place] = exponents.to(torch.uint8)
        return numbers.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)

    @by_name
    def gemm_a8w8(
        self, XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        self._check_eight_bits(XQ, WQ)
        self._scales(x_scale, w_scale)
        assert x_scale.shape == (len(XQ), 1) and w_scale.shape == (1, len(WQ)) and (bias is None or bias.dtype == dtype)
        assert dtype in (torch.bfloat16, torch.float16)
        product = (XQ.float() * x_scale) @ (WQ.float() * w_scale.T).T
        return (product if bias is None else product + bias.float()).to(dtype)

    @by_name
    def gemm_a8w8_bpreshuffle(
        self, XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        self._check_eight_bits(XQ, WQ)
        self._scales(x_scale, w_scale)
        assert WQ.dtype == self.fp8 and x_scale.shape == (len(XQ), 1) and w_scale.shape == (len(WQ), 1)
        return ((XQ.float() * x_scale) @ (unshuffled(WQ).float() * w_scale).T).to(dtype)

    @by_name
    def gemm_a8w8_blockscale(
        self, XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        self._check_eight_bits(XQ, WQ)
        return self._by_block(XQ, WQ, x_scale, w_scale, dtype)

    def _by_block(self, XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
        self._scales(x_scale, w_scale)
        assert x_scale.shape == (len(XQ), XQ.shape[1] // 128) and x_scale.is_contiguous()
        return ((XQ.float() * blocks(x_scale, 1, 128)) @ (WQ.float() * blocks(w_scale, 128, 128)).T).to(dtype)

    @by_name
    def gemm_a8w8_blockscale_bpreshuffle(
        self, XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        assert x_scale.shape == (len(XQ), XQ.shape[1] // 128) and x_scale.is_contiguous()
        by_token = x_scale.reshape(x_scale.shape[1], x_scale.shape[0]).T.contiguous()
        return self._by_block(XQ, unshuffled(WQ), by_token, w_scale, dtype)

    @by_name
    def gemm_a4w4(self, A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, dtype: torch.dtype) -> Tensor:
        assert self.arch == "gfx950" and A.dtype == B.dtype == torch.float4_e2m1fn_x2
        assert A_scale.dtype == B_scale.dtype == torch.float8_e8m0fnu
        rows, groups = unshuffled(B.view(torch.uint8)), A.shape[1] // 16
        x = unpacked(A, unshuffled_scales(A_scale, len(A), groups))
        return (x @ unpacked(rows, unshuffled_scales(B_scale, len(B), groups)).T).to(dtype)

    @by_name
    def scaled_mm(
        self, inp: Tensor, weights: Tensor, bias: Tensor | None, otype: torch.dtype, scale_a: Tensor, scale_b: Tensor
    ) -> Tensor:
        """tgemm.mm of fp8 numbers."""
        self._check_eight_bits(inp, weights)
        self._scales(scale_a, scale_b)
        assert bias is None or bias.dtype == otype
        assert scale_a.shape == scale_b.shape == (1,) and not getattr(weights, "is_shuffled", False)
        product = (inp.float() * scale_a) @ (weights.float() * scale_b).T
        return (product if bias is None else product + bias.float()).to(otype)

    def rmsnorm2d_fwd_with_dynamicquant(self, a: Any) -> None:
        self._norm(a, a.input)

    def rmsnorm2d_fwd_with_add_dynamicquant(self, a: Any) -> None:
        self._float(a.input, a.residual_in, a.residual_out)
        assert a.residual_in.is_contiguous() and a.residual_out.is_contiguous()
        a.residual_out.copy_(a.input + a.residual_in)
        self._norm(a, a.residual_out)

    def _norm(self, a: Any, x: Tensor) -> None:
        self._float(a.input, x, a.weight)
        by_mx = a.out.dtype == torch.float4_e2m1fn_x2
        assert a.input.is_contiguous() and a.out.is_contiguous()
        assert a.yscale.dtype == (torch.float8_e8m0fnu if by_mx else torch.float32)
        wide = x.float()
        normed = wide * (wide.square().mean(-1, keepdim=True) + a.epsilon).rsqrt() * a.weight.float()
        if by_mx:
            assert self.arch == "gfx950" and a.group_size == 32 and a.shuffle_scale and a.weight.shape == x.shape[1:]
            numbers, scales = (part.view(torch.uint8) for part in self._by_mx(normed))
            assert a.out.shape == numbers.shape and a.yscale.shape == scales.shape
            a.out.view(torch.uint8).copy_(numbers)
            a.yscale.view(torch.uint8).copy_(scales)
            return
        if group := getattr(a, "group_size", None):
            assert a.out.dtype == self.fp8
            numbers, scales = self._by_group(normed, group, a.shuffle_scale)
        else:
            numbers, scales = self._by_token(normed, a.out.dtype)
        assert a.yscale.shape == scales.shape
        a.out.copy_(numbers)
        a.yscale.copy_(scales)

    @by_name
    def silu_and_mul_quant(
        self,
        out: Tensor,
        input: Tensor,  # noqa: A002
        scale: Tensor,
        group_size: int,
        shuffle_scale: bool = False,
    ) -> None:
        self._float(input)
        gate, up = input.float().chunk(2, -1)
        numbers, scales = self._by_group(gate.sigmoid() * gate * up, group_size, shuffle_scale)
        assert out.dtype == self.fp8
        out.copy_(numbers)
        assert scale.shape == scales.shape
        scale.copy_(scales)

    @by_name
    def topk_softmax(
        self,
        topk_weights: Tensor,
        topk_indices: Tensor,
        token_expert_indices: Tensor,
        gating_output: Tensor,
        need_renorm: bool,
    ) -> None:
        assert token_expert_indices.shape == topk_indices.shape and token_expert_indices.dtype == torch.int32
        assert gating_output.is_contiguous()
        assert topk_weights.dtype == torch.float32 and topk_indices.dtype == torch.int32
        for row, logits in enumerate(gating_output.float()):
            shares = logits.softmax(-1)
            self._take(topk_weights[row], topk_indices[row], shares, shares.clone(), need_renorm, 1.0)

    def _take(
        self, weights: Tensor, experts: Tensor, scores: Tensor, choice: Tensor, renorm: bool, scale: float
    ) -> None:
        """One after the other the first of the highest that are left."""
        for place in range(len(experts)):
            best = int(choice.argmax())
            experts[place], weights[place] = best, scores[best]
            choice[best] = -torch.inf
        weights.mul_(scale / float(weights.sum()) if renorm else scale)

    def _keep_groups(self, choice: Tensor, scores: list[float], groups: int, top_groups: int) -> None:
        kept = sorted(range(groups), key=lambda group: (-scores[group], group))[:top_groups]
        for group, part in enumerate(choice.view(groups, -1)):
            if group not in kept:
                part.fill_(-torch.inf)

    @by_name
    def grouped_topk(
        self,
        gating_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_expert_group: int,
        topk_group: int,
        need_renorm: bool,
        is_softmax: bool = True,
        routed_scaling_factor: float = 1.0,
    ) -> None:
        assert isinstance(is_softmax, bool)
        for row, logits in enumerate(gating_output.float()):
            scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
            choice = scores.clone()
            best = [float(part.max()) for part in choice.view(num_expert_group, -1)]
            self._keep_groups(choice, best, num_expert_group, topk_group)
            self._take(topk_weights[row], topk_ids[row], scores, choice, need_renorm, routed_scaling_factor)

    @by_name
    def biased_grouped_topk(
        self,
        gating_output: Tensor,
        correction_bias: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_expert_group: int,
        topk_group: int,
        need_renorm: bool,
        routed_scaling_factor: float = 1.0,
    ) -> None:
        assert correction_bias.dtype == gating_output.dtype
        for row, logits in enumerate(gating_output.float()):
            choice = logits.sigmoid() + correction_bias.float()
            best = [float(part.sort().values[-2:].sum()) for part in choice.view(num_expert_group, -1)]
            self._keep_groups(choice, best, num_expert_group, topk_group)
            scores = logits.sigmoid()
            self._take(topk_weights[row], topk_ids[row], scores, choice, need_renorm, routed_scaling_factor)

    @by_name
    def greedy_sample(self, out: Tensor, input: Tensor) -> None:  # noqa: A002
        assert out.dtype == torch.int32
        for row, logits in enumerate(input.tolist()):
            out[row] = logits.index(max(logits))

    @by_name
    def fused_moe(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weight: Tensor,
        topk_ids: Tensor,
        activation: str,
        quant_type: str,
        w1_scale: Tensor | None,
        w2_scale: Tensor | None,
    ) -> Tensor:
        assert getattr(w1, "is_shuffled", False) and getattr(w2, "is_shuffled", False) and activation == "Silu"
        self._float(hidden_states)
        self._scales(*(() if quant_type == "per_1x32" else (w1_scale, w2_scale)))
        assert topk_ids.dtype == torch.int32 and topk_weight.dtype == torch.float32
        out = torch.zeros(hidden_states.shape)
        chosen = {
            expert: [self._expert(*each, expert, quant_type) for each in ((w1, w1_scale), (w2, w2_scale))]
            for expert in topk_ids.unique().tolist()
        }
        for token, (x, weights, experts) in enumerate(zip(hidden_states.float(), topk_weight, topk_ids, strict=True)):
            for weight, expert in zip(weights, experts.tolist(), strict=True):
                up, down = chosen[expert]
                gate, value = (up @ self._rounded(x, quant_type, w1.dtype)).chunk(2)
                gated = (gate.sigmoid() * gate * value).to(hidden_states.dtype).float()
                out[token] += weight * (down @ self._rounded(gated, quant_type, w1.dtype))
        return out.to(hidden_states.dtype)

    def _expert(self, weight: Tensor, scale: Tensor | None, expert: int, quant_type: str) -> Tensor:
        if quant_type == "per_1x32":
            assert weight.dtype == torch.float4_e2m1fn_x2 and self.arch == "gfx950"
            assert scale is not None and scale.dtype == torch.float8_e8m0fnu
            rows = unshuffled(weight.view(torch.uint8)[expert])
            count, groups = len(rows), rows.shape[1] // 16
            every = unshuffled_scales(scale, len(weight) * count, groups)
            return unpacked(rows, every.view(-1, count, groups)[expert])
        rows = unshuffled(weight[expert]).float()
        if quant_type == "No":
            assert scale is None and weight.is_floating_point() and weight.element_size() > 1
            return rows
        assert scale is not None and weight.dtype in (self.fp8, torch.int8)
        if quant_type == "per_128x128":
            return rows * blocks(scale[expert], 128, 128)
        assert quant_type in ("per_Token", "per_Tensor")
        return rows * scale.view(len(weight), -1, 1)[expert]

    def _rounded(self, x: Tensor, quant_type: str, dtype: torch.dtype) -> Tensor:
        """Activations as they are multiplied, one row; `per_Tensor` too, whose rows share a scale on a GPU."""
        if quant_type == "No":
            return x
        if quant_type == "per_1x32":
            exponents = (x.view(-1, 32).abs().amax(-1).clamp(min=1e-10) / 6).log2().ceil()
            scales = torch.exp2(exponents).repeat_interleave(32)
            return torch.tensor(E2M1)[nearest_e2m1(x / scales)] * scales
        group = 128 if quant_type == "per_128x128" else len(x)
        scales = (x.view(-1, group).abs().amax(-1) / LARGEST[dtype]).repeat_interleave(group)
        return self._numbers(x, scales, dtype).float() * scales

    def mla_decode_fwd(self, a: Any) -> None:
        heads, queries = a.q.shape[1], a.max_seqlen_q
        wider = (32, 64, 128) if "page_size" in vars(a) else (128,)  # the older release has fewer kernels
        assert (heads == 16 and queries in (1, 4)) or (heads in wider and queries <= 4), (heads, queries)
        starts = a.qo_indptr, a.kv_indptr
        self._latent(a.q, a.kv_buffer, a.o, *starts, a.kv_indices, a.kv_last_page_lens, a.sm_scale)

    @by_name
    def mla_prefill_fwd(
        self,
        q: Tensor,
        kv_buffer: Tensor,
        o: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_lens: Tensor,
        max_seqlen_q: int,
        sm_scale: float,
    ) -> None:
        assert q.shape[1] in (16, 128) and max_seqlen_q >= int(qo_indptr.diff().max())
        self._latent(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, sm_scale)

    def _latent(
        self, q: Tensor, kv: Tensor, o: Tensor, q_ptr: Tensor, kv_ptr: Tensor, slots: Tensor, last: Tensor, scale: float
    ) -> None:
        assert q.dtype == kv.dtype == torch.bfloat16 and q.is_contiguous() and q.shape[2] == 576
        assert kv.shape[1:] == (1, 1, 576) and o.shape == (*q.shape[:2], 512) and (last == 1).all()
        assert {t.dtype for t in (q_ptr, kv_ptr, slots, last)} == {torch.int32}
        for row in range(len(q_ptr) - 1):
            keys = kv[slots[kv_ptr[row] : kv_ptr[row + 1]].long(), 0, 0].float()
            tokens = range(int(q_ptr[row]), int(q_ptr[row + 1]))
            for place, token in enumerate(tokens):
                seen = keys[: len(keys) - len(tokens) + place + 1]
                o[token] = (q[token].float() @ seen.T * scale).softmax(-1) @ seen[:, :512]


def put_enums(module: Any) -> None:
    """AITER's enumerations, each value its own name."""
    module.ActivationType = SimpleNamespace(Silu="Silu", Gelu="Gelu", Swiglu="Swiglu")
    kinds = ("No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128")
    module.QuantType = SimpleNamespace(**{kind: kind for kind in kinds})
