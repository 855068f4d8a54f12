"""Multi-head latent attention as a model file declares it: sizes, and the checkpoint's names. Values only.

Shared by models/spec.py (a field of DecoderSpec and of DecoderNames), loader, division and layers/latent_attention.py.
Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; its letters in brackets.
"""

from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]
GATE_NUMBERS = 8  # a token's id, and mean and deviation of its keys and values: in words of 32 bits, of 16 bits or more


def bias_of(weight: str) -> str:
    """The checkpoint name of the bias that belongs to a weight."""
    return weight.removesuffix(".weight") + ".bias"


@dataclass(frozen=True)
class IndexerSpec:
    """The lightning indexer of sparse attention (DeepSeek-V3.2): which tokens of its context a token attends to."""

    num_heads: int
    head_dim: int  # its first LatentSpec.rope_dim numbers are rotated
    top_k: int
    interleaved: bool  # as LatentSpec.interleaved
    shared: tuple[bool, ...] = ()  # by layer: takes the choice of the last layer before it that made one; (): none does

    def shares(self, layer: int) -> bool:
        return layer < len(self.shared) and self.shared[layer]


@dataclass(frozen=True)
class LatentSpec:
    """One latent and one rotated key per token, for all heads; each head's key and value are projections of it."""

    latent: int  # numbers of a latent (d_c)
    query_rank: int  # of a query's own latent (d_c'); 0: queries are projected directly
    nope_dim: int  # of a head's query and key, not rotated (d_h)
    rope_dim: int  # rotated, behind those (d_h^R)
    value_dim: int
    interleaved: bool = True  # a pair to rotate lies side by side in the checkpoint, not half a head apart
    bias: bool = False  # of the projections down
    norm_eps: float = 1e-6  # of the latents' norms
    indexer: IndexerSpec | None = None
    gate: int = 0  # numbers of a token's embedding that gates keys and values (EG-MLA); 0: nothing does

    @property
    def cached(self) -> int:
        """Numbers of a token that attention reads from the cache."""
        return self.latent + self.rope_dim

    @property
    def row(self) -> int:
        """Numbers of a token in a page: latent, rotated key, and the indexer's key or what a gate needs to know."""
        more = GATE_NUMBERS if self.gate else 0 if self.indexer is None else self.indexer.head_dim
        return self.cached + more

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def expanded(self) -> int:
        """Numbers of a head's key, without what is rotated, and value."""
        return self.nope_dim + self.value_dim

    def costs(self, hidden: int, heads: int) -> tuple[int, int]:
        """Elements of a layer's matrices, and numbers of all heads' keys and values of a position.

        With an indexer those of its keys, since it looks at all positions; attention to the ones that it chooses, which
        is absorbed, costs every token the same and counts as matrices.
        """
        queries = heads * self.query_dim
        down = self.query_rank or queries
        up = self.query_rank * queries + heads * self.expanded * self.latent
        weights = hidden * (down + self.cached + heads * self.value_dim) + up
        if (indexer := self.indexer) is not None:
            chosen = indexer.top_k * heads * (self.latent + self.cached)
            return weights + chosen, indexer.num_heads * indexer.head_dim
        return weights, heads * (self.query_dim + self.value_dim)


@dataclass(frozen=True)
class LatentNames:
    """Checkpoint names. `{i}` is the layer. Without `query_rank` queries are DecoderNames.qkv[0]."""

    q_a: str
    q_a_norm: str
    q_b: str
    kv_a: str
    kv_a_norm: str
    kv_b: str
    index_q: str = ""
    index_k: str = ""
    index_k_norm: str = ""  # a layer norm: it has a bias, too
    index_weights: str = ""
    gate: str = ""  # embeddings
    gate_up: str = ""
    gated_norm: str = ""  # a layer norm of all heads' keys and values


def latent_shapes(
    spec: LatentSpec, names: LatentNames, q: str, layer: int, hidden: int, heads: int, vocabulary: int
) -> Iterator[tuple[str, Shape]]:
    """Every tensor of a layer's attention but the output projection, with its shape. `q`: DecoderNames.qkv[0]."""
    queries = heads * spec.query_dim
    shapes: dict[str, Shape] = {
        names.kv_a: (spec.cached, hidden),
        names.kv_a_norm: (spec.latent,),
        names.kv_b: (heads * spec.expanded, spec.latent),
    }
    if spec.bias:
        shapes[bias_of(names.kv_a)] = (spec.cached,)
    if spec.query_rank:
        shapes |= {
            names.q_a: (spec.query_rank, hidden),
            names.q_a_norm: (spec.query_rank,),
            names.q_b: (queries, spec.query_rank),
        }
        if spec.bias:
            shapes[bias_of(names.q_a)] = (spec.query_rank,)
    else:
        shapes[q] = (queries, hidden)
    if spec.gate:
        shapes |= {
            names.gate: (vocabulary, spec.gate),
            names.gate_up: (heads * spec.expanded, spec.gate),
            names.gated_norm: (heads * spec.expanded,),
            bias_of(names.gated_norm): (heads * spec.expanded,),
        }
    if (indexer := spec.indexer) is not None and not indexer.shares(layer):
        shapes |= {
            names.index_q: (indexer.num_heads * indexer.head_dim, spec.query_rank),
            names.index_k: (indexer.head_dim, hidden),
            names.index_k_norm: (indexer.head_dim,),
            bias_of(names.index_k_norm): (indexer.head_dim,),
            names.index_weights: (indexer.num_heads, hidden),
        }
    yield from ((name.format(i=layer), shape) for name, shape in shapes.items())
