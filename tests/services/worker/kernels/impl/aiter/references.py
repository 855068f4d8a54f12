"""What AITER's calls mean, in torch, and what they refuse. One method per function, given its arguments by name.

Sources of facts: AITER's own sources (csrc, aiter/ops) of the releases in signatures.json.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.services.worker.kernels.impl.aiter.scaled import Scaled
from tests.services.worker.kernels.impl.aiter.sorted_experts import SortedExperts

INT32, INT64, FLOAT32 = torch.int32, torch.int64, torch.float32


def need(condition: bool, text: str) -> None:
    """Where the real kernel raises, faults, or gives garbage."""
    assert condition, f"AITER: {text}"


class References(Scaled, SortedExperts):
    # norms, gates, products

    def rmsnorm2d_fwd(self, a: Any) -> Tensor:
        self._float(a.input, a.weight)
        need(a.input.dim() == 2 and a.input.stride(1) == 1 and a.weight.shape == a.input.shape[1:], "rows and a weight")
        need(len(a.input) > 0, "an empty grid")
        return _normed(a.input, a.weight, a.epsilon)

    def rmsnorm2d_fwd_with_add(self, a: Any) -> None:
        self._float(a.input, a.weight, a.residual_in, a.residual_out, a.out)
        parts = (a.input, a.residual_in, a.residual_out, a.out)
        need(all(x.dim() == 2 and x.is_contiguous() and len(x) for x in parts), "contiguous rows")
        need(a.out.data_ptr() != a.input.data_ptr(), "out is another tensor")
        a.residual_out.copy_(a.input + a.residual_in)
        a.out.copy_(_normed(a.residual_out, a.weight, a.epsilon))

    def silu_and_mul(self, a: Any) -> None:
        self._gate(a, functional.silu)

    def gelu_tanh_and_mul(self, a: Any) -> None:
        self._gate(a, lambda x: functional.gelu(x, approximate="tanh"))

    def _gate(self, a: Any, activation: Any) -> None:
        self._float(a.out, a.input)
        need(a.input.is_contiguous() and a.out.is_contiguous() and a.input.numel() > 0, "contiguous rows")
        need(a.input.shape == (len(a.out), 2 * a.out.shape[1]), "gate and up side by side")
        need(a.out.shape[1] % 8 == 0, "whole vectors: it writes beyond the end of a row")
        gate, up = a.input.float().chunk(2, -1)
        a.out.copy_(activation(gate) * up)

    def mm(self, a: Any) -> Tensor:
        if a.scale_a is not None:
            product: Tensor = self.scaled_mm(a)
            return product
        self._float(*(x for x in (a.inp, a.weights, a.bias) if x is not None))
        need(a.inp.dim() == 2 and a.inp.shape[1] == a.weights.shape[1] and len(a.inp) > 0, "[M, K] and [N, K]")
        return functional.linear(a.inp, a.weights, a.bias)

    # rotation

    def rope_cached_fwd(self, a: Any) -> Tensor:
        self._float(a.input, a.cos, a.sin)
        need(a.input.dim() == 4 and a.input.shape[1] == 1 and a.input.stride(3) == 1, "[s, b, h, d]")
        return self._rotation(a, a.input)

    def rope_cached_2c_fwd(self, a: Any) -> tuple[Tensor, Tensor]:
        self._float(a.input_x, a.input_y, a.cos, a.sin)
        need(a.input_x.dim() == a.input_y.dim() == 4, "[s, b, h, d]")
        return self._rotation(a, a.input_x), self._rotation(a, a.input_y)

    def _rotation(self, a: Any, x: Tensor) -> Tensor:
        need(len(x) > 0, "an empty grid")
        need(a.rotate_style == 0 and a.reuse_freqs_front_part is True and a.nope_first is False, "as we use it")
        for part in (a.cos, a.sin):
            need(part.is_contiguous(), "it takes no strides of cos and sin")
            need(part.shape[:3] == (len(x), 1, 1), "one row of angles per token")
        return _turned(x, a.cos, a.sin)

    # pages

    def reshape_and_cache(self, a: Any) -> None:
        need(a.asm_layout is True, "the layout with [D, B] values is not ours")
        self._check_write(a)
        self._scales(a.k_scale, a.v_scale)
        num_pages, heads, chunks, block_tokens, x = a.key_cache.shape
        need(a.value_cache.shape == (num_pages, heads, block_tokens // x, chunks * x, x), "shuffled values")
        self._store(a, a.key_cache, a.value_cache)

    def reshape_and_cache_flash(self, a: Any) -> None:
        self._check_write(a)
        need(a.key_cache.dim() == 4 and a.key_cache.stride(0) == a.value_cache.stride(0), "[P, B, K, D], one stride")
        for scale in (a.k_scale, a.v_scale):
            need(scale.shape == (1,) and scale.dtype == FLOAT32, "both scales, always")
        page, offset = a.slot_mapping // a.key_cache.shape[1], a.slot_mapping % a.key_cache.shape[1]
        for cache, new in zip((a.key_cache, a.value_cache), self._stored(a), strict=True):
            _bytes(cache)[page, offset] = _bytes(new)

    def _check_write(self, a: Any) -> None:
        self._float(a.key, a.value)
        need(a.slot_mapping.dtype == INT64 and a.slot_mapping.is_contiguous(), "int64 slots")
        need(len(a.key) == len(a.value) == len(a.slot_mapping) > 0, "a slot for each token")
        for part in (a.key, a.value):
            need(part.stride(2) == 1 and part.stride(1) == part.shape[2], "it takes the stride of tokens only")
        wanted = a.key.dtype if a.kv_cache_dtype == "auto" else self.fp8
        need(a.kv_cache_dtype in ("auto", "fp8"), a.kv_cache_dtype)
        need(a.key_cache.dtype == a.value_cache.dtype == wanted, f"pages of {wanted}")
        need(a.key_cache.is_contiguous() and a.value_cache.is_contiguous(), "contiguous pages")

    def _stored(self, a: Any) -> tuple[Tensor, Tensor]:
        """The conversion to 8 bits does not saturate."""
        if a.kv_cache_dtype == "auto":
            return a.key, a.value
        pairs = ((a.key, a.k_scale), (a.value, a.v_scale))
        limit = torch.finfo(self.fp8).max
        wide = [x.float() / scale for x, scale in pairs]
        # half a unit beyond the largest number still rounds to it
        wide = [torch.where(x.abs() < limit * 1.03, x.clamp(-limit, limit), torch.nan) for x in wide]
        return wide[0].to(self.fp8), wide[1].to(self.fp8)

    def _store(self, a: Any, k_pages: Tensor, v_pages: Tensor) -> None:
        block_tokens, x = k_pages.shape[3:]
        need(x * k_pages.element_size() == 16 and block_tokens % x == 0, "16 bytes")
        page, offset = a.slot_mapping // block_tokens, a.slot_mapping % block_tokens
        k, v = self._stored(a)
        _bytes(k_pages)[page, :, :, offset] = _bytes(k.reshape(*k.shape[:2], -1, x))
        _bytes(v_pages)[page, :, offset // x, :, offset % x] = _bytes(v.contiguous())

    def fused_qk_norm_rope_cache_quant_shuffle(self, a: Any) -> None:
        self._float(a.q, a.k, a.v, a.qw, a.kw, a.cos_sin_cache)
        need(a.kv_cache_dtype == "auto", "8 bits with scales per token are not ours")
        self._scales(a.k_scale, a.v_scale)
        need(isinstance(a.k_scale, Tensor) and isinstance(a.v_scale, Tensor), "tensors, by its schema")
        need(a.head_dim in (64, 128, 256) and a.num_heads_k <= 32 and a.is_neox_style is True, "what it is built for")
        need((a.num_heads_q, a.num_heads_k) == (a.q.shape[1], a.k.shape[1]), "heads")
        need(a.num_heads_v == a.v.shape[1] and a.head_dim == a.q.shape[2], "heads")
        need(a.cos_sin_cache.dim() == 2 and a.cos_sin_cache.is_contiguous() and a.pos_ids.dtype == INT64, "angles")
        need(a.pos_ids.shape == (len(a.q),), "a position for each token")
        cos, sin = a.cos_sin_cache[a.pos_ids][:, None, None].chunk(2, -1)
        for x, weight in ((a.q, a.qw), (a.k, a.kw)):
            normed = _normed(x, weight, a.eps)
            x.copy_(_turned(normed.unsqueeze(1), cos, sin).squeeze(1))
        self._write_fused(a, a.k, a.k_cache, a.v_cache)

    def fused_qk_rope_reshape_and_cache(self, a: Any) -> tuple[Tensor, ...]:
        self._float(a.q, a.k, a.v, a.cos, a.sin)
        need(a.key_cache.dtype in (torch.bfloat16, *self.floats[2:]), "pages of bfloat16")
        need(a.pos.dtype == INT64, "positions as its own callers have them")
        need(a.flash_layout is False and a.is_neox is True and a.output_zeros is False, "as we use it")
        head_dim, block_tokens = a.q.shape[2], a.key_cache.shape[3]
        need(not head_dim & (head_dim - 1) and not block_tokens & (block_tokens - 1), "powers of two")
        need(a.cos.dim() == 2 and a.cos.shape[1] * 2 == head_dim, "whole heads")
        need(a.cos.stride() == a.sin.stride() and a.cos.stride(1) == 1, "it takes the strides of cos for both")
        cos, sin = (x[a.pos][:, None, None] for x in (a.cos, a.sin))
        a.q_out.copy_(_turned(a.q.unsqueeze(1), cos, sin).squeeze(1))
        k = _turned(a.k.unsqueeze(1), cos, sin).squeeze(1)
        self._write_fused(a, k, a.key_cache, a.value_cache)
        return a.q_out, k, a.key_cache, a.value_cache

    def _write_fused(self, a: Any, k: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        need(k_pages.dim() == v_pages.dim() == 5 and k_pages.dtype == k.dtype, "shuffled pages of the same dtype")
        need(a.slot_mapping.dtype == INT64, "int64 slots")
        written = SimpleNamespace(key=k, value=a.v, slot_mapping=a.slot_mapping, kv_cache_dtype="auto")
        self._store(written, k_pages, v_pages)

    # attention

    def unified_attention(self, a: Any) -> None:
        self._float(a.q, a.out)
        need(a.causal is True and a.q_descale is None, "causal, no scale of queries")
        need(a.out.is_contiguous() and a.q.stride(2) == 1, "dense heads")
        shuffled = a.k.dim() == 5
        need(shuffled == bool(getattr(a, "shuffled_kv_cache", False)), "the layout that it is told")
        need((a.k.dtype == self.fp8) == (a.k_descale is not None), "scales with 8 bits and only with them")
        need(a.k.dtype == a.v.dtype and a.k.dtype in (a.q.dtype, self.fp8), "pages of the queries' dtype, or of 8 bits")
        self._scales(a.k_descale, a.v_descale)
        self._check_rows(a.cu_seqlens_q, a.seqused_k, a.block_table)
        need(a.max_seqlen_q >= int(a.cu_seqlens_q.diff().max()), "max_seqlen_q is a bound")
        need(a.sinks is None or a.sinks.shape == (a.q.shape[1],), "a sink for each head")
        rows = (a.cu_seqlens_q, a.seqused_k, a.block_table)
        kind = (a.softmax_scale, a.window_size[0], a.softcap, a.sinks)
        _attend(a.q, a.out, (a.k, a.v), rows, kind, (a.k_descale, a.v_descale))

    def pa_fwd_asm(self, a: Any) -> Tensor:
        self._float(a.Q, a.K, a.V, a.out_)
        need(a.Q.shape[2] == 128 and a.K.shape[3] == 16 and a.K.dim() == a.V.dim() == 5, "heads of 128, pages of 16")
        need(a.Q.shape[1] // a.K.shape[1] <= 16, "no kernel for this group")
        need(a.Q.is_contiguous() and a.out_.is_contiguous(), "it takes one stride, of Q's rows")
        need(a.block_tables_stride0 == a.block_tables.stride(0), "the stride of the table")
        starts = torch.arange(len(a.Q) + 1, dtype=INT32)
        self._check_rows(starts, a.context_lens, a.block_tables)
        rows = (starts, a.context_lens, a.block_tables)
        _attend(a.Q, a.out_, (a.K, a.V), rows, (128**-0.5, -1, 0.0, None))
        return a.out_

    def pa_decode_gluon(self, a: Any) -> None:
        self._float(a.query, a.output)
        need(a.query_length == 1 and a.context_partition_size == 256 and a.ps is True, "as we use it")
        need(a.key_cache.dim() == a.value_cache.dim() == 5 and a.key_cache.shape[3] in (16, 64, 1024), "its pages")
        need(a.query.shape[1] // a.key_cache.shape[1] <= 64, "the group")
        need(a.key_cache.dtype in (a.query.dtype, self.fp8) and a.compute_type == a.query.dtype, "dtypes")
        need((a.key_cache.dtype == self.fp8) == (a.key_scale is not None), "scales with 8 bits and only with them")
        need(a.value_cache.dtype == a.key_cache.dtype, "pages of one dtype")
        self._scales(a.key_scale, a.value_scale)
        starts = torch.arange(len(a.query) + 1, dtype=INT32)
        self._check_rows(starts, a.context_lengths, a.block_tables)
        pages, rows = (a.key_cache, a.value_cache), (starts, a.context_lengths, a.block_tables)
        _attend(a.query, a.output, pages, rows, (a.softmax_scale, -1, 0.0, None), (a.key_scale, a.value_scale))

    def get_recommended_splits(self, a: Any) -> int:
        need(a.num_sequences > 0 and a.num_kv_heads > 0, "a division")
        return 8

    def mha_batch_prefill_func(self, a: Any) -> Tensor:
        self._float(a.q, a.k, a.v, a.out)
        need(a.k.dim() == a.v.dim() and a.k.dim() in (4, 5) and a.q.shape[2] % 8 == 0 and a.q.shape[2] <= 256, "pages")
        self._check_rows(a.cu_seqlens_q, a.seqlen_k, a.block_table)
        need(a.kv_indptr.dtype == INT32 and a.kv_indptr.shape == a.cu_seqlens_q.shape, "kv_indptr, though unused")
        need(a.kv_indptr.is_contiguous() and a.kv_page_indices.dtype == INT32, "kv_page_indices, though unused")
        need(a.max_seqlen_q >= int(a.cu_seqlens_q.diff().max()), "the grid")
        need(a.out.shape == a.q.shape and a.causal is True, "out")
        need(a.sink_ptr is None or a.sink_ptr.dtype == FLOAT32, "sinks of float32")
        window = -1 if a.window_size[0] >= a.max_seqlen_k else a.window_size[0]
        rows = (a.cu_seqlens_q, a.seqlen_k, a.block_table)
        _attend(a.q, a.out, (a.k, a.v), rows, (a.softmax_scale, window, a.logits_soft_cap, a.sink_ptr))
        return a.out

    def flash_attn_varlen_func(self, a: Any) -> Tensor:
        self._float(a.q, a.k, a.v)
        need(all(x.dim() == 3 and x.stride(2) == 1 for x in (a.q, a.k, a.v)), "dense heads")
        need(a.k.shape[:2] == a.v.shape[:2] and a.q.shape[2] == a.k.shape[2] <= 256, "keys and values of one place")
        rows = a.cu_seqlens_q, a.cu_seqlens_k
        need(all(x.dtype == INT32 and x.is_contiguous() and int(x[0]) == 0 for x in rows), "starts of rows")
        need(len(rows[0]) == len(rows[1]) and int(rows[0][-1]) == len(a.q) > 0, "a start each, and the end")
        need(a.max_seqlen_q >= int(rows[0].diff().max()) and a.max_seqlen_k >= int(rows[1].diff().max()), "the grid")
        out = a.q.new_empty(*a.q.shape[:2], a.v.shape[2])
        spans = zip(*(x.unfold(0, 2, 1).tolist() for x in rows), strict=True)
        for (first, last), (begin, end) in spans:
            scores = torch.einsum("thd,chd->htc", a.q[first:last].float(), a.k[begin:end].float()) * a.softmax_scale
            hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(end - begin - (last - first) + 1)
            weights = scores.masked_fill(hidden & bool(a.causal), -torch.inf).softmax(-1)
            out[first:last] = torch.einsum("htc,chd->thd", weights, a.v[begin:end].float()).to(out.dtype)
        return out

    def _check_rows(self, starts: Tensor, lens: Tensor, tables: Tensor) -> None:
        need(starts.dtype == lens.dtype == tables.dtype == INT32, "int32 rows")
        need(starts.is_contiguous() and lens.is_contiguous() and tables.stride(1) == 1, "contiguous rows")
        need(len(starts) == len(lens) + 1 == len(tables) + 1 > 1, "one start, length and table a row")
        need(int(starts[0]) == 0, "tokens are counted from the first row's")


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, 1, H, D]; cos, sin: [T, 1, 1, R / 2]; the first R of D turn, element i with i + R / 2."""
    half = cos.shape[-1]
    cos, sin = cos.float(), sin.float()
    low, high, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)
    return torch.cat((turned, rest), -1)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _context(pages: tuple[Tensor, Tensor], table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """One row's keys and values [length, K, D], number by number from where the layout has them."""
    keys, values = pages
    position = torch.arange(length)
    shuffled = keys.dim() == 5
    block_tokens = keys.shape[3] if shuffled else keys.shape[1]
    page, offset = table[position // block_tokens].long(), position % block_tokens
    if not shuffled:
        return keys[page, offset], values[page, offset]
    x = keys.shape[4]
    k = _bytes(keys)[page, :, :, offset].reshape(length, keys.shape[1], -1)
    v = _bytes(values)[page, :, offset // x, :, offset % x]
    return k.view(keys.dtype), v.contiguous().view(values.dtype)


def _attend(
    q: Tensor,
    out: Tensor,
    pages: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor],
    kind: tuple[float, int, float, Tensor | None],
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """kind: scale, tokens seen before the own one (-1: all), soft cap, sinks. A row's tokens are its context's last."""
    scale, left, softcap, sinks = kind
    starts, lens, tables = rows
    for row, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        if begin == end:
            continue
        length = int(lens[row])
        k, v = _context(pages, tables[row], length)
        k, v = k.float() * (1 if scales[0] is None else scales[0]), v.float() * (1 if scales[1] is None else scales[1])
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,chd->htc", q[begin:end].float(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(length - (end - begin), length)[:, None]
        seen = torch.arange(length) <= own
        if left >= 0:
            seen &= torch.arange(length) >= own - left
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, end - begin, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        out[begin:end] = torch.einsum("htc,chd->thd", weights, v).to(out.dtype)
