"""What a token costs in the KV cache: by a checkpoint's own attention, and by the others side by side; and what a
sequence really takes, layer by layer. Pure.

Numbers of one token and layer, for H query heads, K KV heads, heads of D (values of V): MHA H * (D + V), GQA
K * (D + V), MLA (DeepSeek-V2, arXiv 2405.04434) a latent and one rotated key for all heads, EG-MLA (arXiv 2509.16686)
the same with a smaller latent: what gates it comes from an embedding of the token, so that it is in no cache.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from common.kv_needs import needs
from services.worker.groups import Storage, bytes_of, lay_out
from services.worker.models.caches import LayerCache, PagedKv
from services.worker.models.spec import Config, DecoderSpec

GIB, MIB = 1 << 30, 1 << 20
SEQUENCES = (1024, 8192, 131_072)  # tokens
# DeepSeek-V2's latent and rotated key in heads' sizes, for a checkpoint that has neither
LATENT, ROTATED = 4, 0.5
LESS_THAN_MLA = 0.599  # what EG-MLA's paper says that it saves at most


class Attention(NamedTuple):
    """What a cache's size depends on."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    latent: int  # 0: this is no MLA
    rotated: int


def read(values: Mapping[str, object]) -> Attention:
    """From a checkpoint's config.json. Raises ValueError naming a value that is missing or mistyped."""
    config = Config(values).text
    heads = config.get(int, "num_attention_heads")
    rotated = config.get(int, "qk_rope_head_dim", 0)
    latent = config.get(int, "kv_lora_rank", 0)
    if heads < 1 or latent < 0 or rotated < 0:
        raise ValueError(f"config: {heads} heads, a latent of {latent} and {rotated} rotated are not possible")
    whole = config.get(int, "head_dim", config.get(int, "hidden_size") // heads)
    head_dim = config.get(int, "qk_nope_head_dim", 0) + rotated if latent else whole
    return Attention(
        layers=config.num_layers,
        heads=heads,
        kv_heads=heads if latent else config.get(int, "num_key_value_heads", heads),
        head_dim=head_dim,
        value_dim=config.get(int, "v_head_dim", head_dim),
        latent=latent,
        rotated=rotated,
    )


def rows(attention: Attention, number_bytes: int, eg_latent: int = 0) -> list[dict[str, Any]]:
    """One record per kind of attention; `eg_latent`: of EG-MLA, 0: what the paper saves at most."""
    of = attention
    latent, rotated = of.latent, of.rotated
    if not latent:
        latent, rotated = LATENT * of.head_dim, int(ROTATED * of.head_dim)
    mla = latent + rotated
    eg = eg_latent + rotated if eg_latent else round((1 - LESS_THAN_MLA) * mla)
    both = of.head_dim + of.value_dim
    own = "MLA" if of.latent else "MHA" if of.kv_heads == of.heads else "GQA"
    groups = max(of.heads // 8, 1) if own == "MLA" else of.kv_heads
    kinds = {
        "MHA": (of.heads * both, f"{of.heads} heads x {both}"),
        "GQA": (groups * both, f"{groups} heads x {both}" + (", 8 query heads each" if own == "MLA" else "")),
        "MLA": (mla, f"latent {latent} + rotated {rotated}" + ("" if of.latent else ", as DeepSeek-V2 would have")),
        "EG-MLA": (eg, f"latent {eg - rotated} + rotated {rotated}" + ("" if eg_latent else ", the paper's least")),
    }
    ours = kinds[own][0]
    return [
        {
            "attention": f"{kind} (this checkpoint)" if kind == own else kind,
            "of a token and layer": formula,
            "bytes per token": numbers * of.layers * number_bytes,
            "tokens per GiB": GIB // (numbers * of.layers * number_bytes),
            "to this": f"{numbers / ours:.2f}",
        }
        for kind, (numbers, formula) in kinds.items()
    ]


def kept(spec: DecoderSpec, block_tokens: int, storage: Storage, every: int = 0) -> list[dict[str, Any]]:
    """What a running sequence has in the cache: one record per kind of layers, and all together in pages."""
    caches = [spec.cache_of(layer) for layer in range(spec.num_layers)]
    layout = lay_out(caches, block_tokens, storage, every)
    kinds: dict[str, list[LayerCache]] = {}
    for cache in caches:
        words = f"the last {cache.window:,} tokens" if isinstance(cache, PagedKv) and cache.window else "all tokens"
        kinds.setdefault(words if isinstance(cache, PagedKv) else "a state", []).append(cache)
    found = [
        {"kept": kind, "layers": len(layers), "bytes per token": _per_token(layers, storage)}
        | {_column(tokens): round(_size(layers, tokens, storage) / MIB, 1) for tokens in SEQUENCES}
        for kind, layers in kinds.items()
    ]
    block_bytes = layout.block_bytes(block_tokens, storage)
    together: dict[str, Any] = {}
    for tokens in SEQUENCES:
        blocks = needs(layout.groups, len(layout.pools), tokens, block_tokens)
        size = sum(number * each for number, each in zip(blocks, block_bytes, strict=True))
        together[_column(tokens)] = round(size / MIB, 1)
    words = f"together, {len(layout.groups)} block tables, blocks of {block_tokens} tokens"
    together |= {"kept": words, "layers": spec.num_layers, "bytes per token": _per_token(caches, storage)}
    return [*found, {key: together[key] for key in found[0]}]


def _column(tokens: int) -> str:
    return f"MiB of {tokens:,} tokens"


def _per_token(caches: Sequence[LayerCache], storage: Storage) -> int:
    """What one token more adds, of layers that keep all tokens or have not kept a whole window yet."""
    return sum(bytes_of(cache, 1, storage) for cache in caches if isinstance(cache, PagedKv))


def _size(caches: Sequence[LayerCache], tokens: int, storage: Storage) -> int:
    return sum(
        bytes_of(cache, min(tokens, cache.window or tokens), storage)
        if isinstance(cache, PagedKv)
        else bytes_of(cache, 1, storage)
        for cache in caches
    )
