"""Which of AITER's attention kernels serves which rows, and how each is called.

A kernel is used only for the pages, heads and sorts of attention that it was built for, else the next: for decode
pa_fwd_asm, pa_decode_gluon, unified_attention; for chunks of prompts mha_batch_prefill_func, unified_attention.
No call waits for the device. `max_context` is no bound where a step is replayed, so nothing may depend on it but speed.
"""

import math

from torch import Tensor

from services.worker.kernels.impl.aiter._host import Function
from services.worker.kernels.impl.aiter._pages import UNIFIED, UNIFIED_SHUFFLED
from services.worker.kernels.ops.paged_attention import AttentionRows, AttentionSpec

ASSEMBLY = Function(
    "aiter:pa_fwd_asm", needs=("Q", "K", "V", "block_tables", "context_lens", "block_tables_stride0", "out_")
)
GLUON = Function(
    "aiter:pa_decode_gluon",
    needs=(
        "output",
        "query",
        "key_cache",
        "value_cache",
        "context_lengths",
        "block_tables",
        "softmax_scale",
        "query_length",
        "max_context_partition_num",
        "context_partition_size",
        "compute_type",
        "key_scale",
        "value_scale",
        "ps",
    ),
)
SPLITS = Function(
    "aiter.ops.triton.gluon.pa_decode_gluon:get_recommended_splits", needs=("num_sequences", "num_kv_heads")
)
PREFILL = Function(
    "aiter:mha_batch_prefill_func",
    needs=(
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "kv_indptr",
        "kv_page_indices",
        "max_seqlen_q",
        "max_seqlen_k",
        "softmax_scale",
        "logits_soft_cap",
        "causal",
        "window_size",
        "out",
        "block_table",
        "seqlen_k",
        "sink_ptr",
    ),
)
ASSEMBLY_HEAD_DIM, ASSEMBLY_PAGE, ASSEMBLY_GROUP = 128, 16, 16  # the last: query heads of a KV head, at most
GLUON_HEAD_DIMS, GLUON_PAGES, GLUON_GROUP, GLUON_PART = (64, 128), (16, 64), 64, 256
PREFILL_HEAD_DIMS, PREFILL_PAGES = (128, 256), (16,)


class Pages:
    """Keys and values of a layer, and what their shape says. Either layout of kernels/layout.py."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.shuffled = values.dim() == 5
        self.head_dim = values.shape[3]
        self.num_heads = values.shape[1] if self.shuffled else values.shape[2]
        self.block_tokens = keys.shape[3] if self.shuffled else keys.shape[1]


def decode(q: Tensor, out: Tensor, pages: Pages, rows: AttentionRows, spec: AttentionSpec) -> None:
    """The first `num_decode` rows. q, out: [T, H, D], all rows' tokens."""
    count = rows.num_decode
    q, out = q[:count], out[:count]
    tables, lens = rows.tables[:count], rows.context_lens[:count]
    if takes_assembly(q, pages, spec):
        ASSEMBLY(
            Q=q.contiguous(),  # it takes one stride of rows, and nothing says that its output has another
            K=pages.keys,
            V=pages.values,
            block_tables=tables,
            context_lens=lens,
            block_tables_stride0=tables.stride(0),
            out_=out,
        )
    elif takes_gluon(q, pages, spec):
        GLUON(
            output=out,
            query=q,
            key_cache=pages.keys,
            value_cache=pages.values,
            context_lengths=lens,
            block_tables=tables,
            softmax_scale=spec.scale,
            query_length=1,
            max_context_partition_num=SPLITS(num_sequences=count, num_kv_heads=pages.num_heads),
            context_partition_size=GLUON_PART,
            compute_type=q.dtype,
            key_scale=spec.kv_scale and spec.kv_scale.k,
            value_scale=spec.kv_scale and spec.kv_scale.v,
            ps=True,
        )
    else:
        _unified(q, out, pages, (rows.query_starts[: count + 1], lens, tables), (1, rows.max_context), spec)


def prefill(q: Tensor, out: Tensor, pages: Pages, rows: AttentionRows, spec: AttentionSpec) -> None:
    """The rows behind those."""
    count = rows.num_decode
    q, out = q[count:], out[count:]
    tables, lens = rows.tables[count:], rows.context_lens[count:]
    if not takes_prefill(q, pages, spec):
        _unified(q, out, pages, (rows.chunk_starts, lens, tables), (rows.max_query, rows.max_context), spec)
        return
    PREFILL(
        q=q,
        k=pages.keys,
        v=pages.values,
        cu_seqlens_q=rows.chunk_starts,
        # the pages are in block_table: of these only the dtypes and the number of rows count
        kv_indptr=rows.chunk_starts,
        kv_page_indices=tables,
        max_seqlen_q=rows.max_query,
        # a window as wide as this would be taken for none
        max_seqlen_k=tables.shape[1] * pages.block_tokens,
        softmax_scale=spec.scale,
        logits_soft_cap=spec.softcap,
        causal=True,
        window_size=_window(spec),
        out=out,
        block_table=tables,
        seqlen_k=lens,
        sink_ptr=spec.sinks,
    )


def _unified(
    q: Tensor,
    out: Tensor,
    pages: Pages,
    rows: tuple[Tensor, Tensor, Tensor],
    longest: tuple[int, int],
    spec: AttentionSpec,
) -> None:
    """rows: starts of their tokens, lengths of their contexts, their blocks; longest: tokens, context."""
    arguments = {
        "q": q,
        "k": pages.keys,
        "v": pages.values,
        "out": out,
        "cu_seqlens_q": rows[0],
        "max_seqlen_q": longest[0],
        "seqused_k": rows[1],
        "max_seqlen_k": longest[1],
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": _window(spec),
        "block_table": rows[2],
        "softcap": spec.softcap,
        "q_descale": None,
        "k_descale": spec.kv_scale and spec.kv_scale.k,
        "v_descale": spec.kv_scale and spec.kv_scale.v,
        "sinks": spec.sinks,
    }
    if pages.shuffled:
        UNIFIED_SHUFFLED(shuffled_kv_cache=True, **arguments)
    else:
        UNIFIED(**arguments)


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """Tokens before and behind a token that it sees; -1: all. AITER does not count the token itself."""
    return (spec.window - 1, 0) if spec.window else (-1, -1)


def _is_plain(spec: AttentionSpec) -> bool:
    return not spec.window and not spec.softcap and spec.sinks is None


def takes_assembly(q: Tensor, pages: Pages, spec: AttentionSpec) -> bool:
    """The scale of scores is part of that kernel. Its 8-bit pages want a scale per token, which ours have not."""
    shape = pages.head_dim == ASSEMBLY_HEAD_DIM and pages.block_tokens == ASSEMBLY_PAGE
    group = q.shape[1] // pages.num_heads <= ASSEMBLY_GROUP
    scaled = math.isclose(spec.scale, ASSEMBLY_HEAD_DIM**-0.5)
    fits = pages.shuffled and shape and group and scaled and pages.keys.dtype == q.dtype
    return fits and _is_plain(spec) and ASSEMBLY.missing() is None


def takes_gluon(q: Tensor, pages: Pages, spec: AttentionSpec) -> bool:
    shape = pages.head_dim in GLUON_HEAD_DIMS and pages.block_tokens in GLUON_PAGES
    fits = pages.shuffled and shape and q.shape[1] // pages.num_heads <= GLUON_GROUP
    return fits and _is_plain(spec) and GLUON.missing() is None and SPLITS.missing() is None


def takes_prefill(q: Tensor, pages: Pages, spec: AttentionSpec) -> bool:
    """Queries and pages of one dtype: not 8 bits."""
    shape = pages.head_dim in PREFILL_HEAD_DIMS and pages.block_tokens in PREFILL_PAGES
    return shape and pages.keys.dtype == q.dtype and PREFILL.missing() is None
