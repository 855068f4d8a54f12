"""Dimensions of the models that figures are given for. Data only, so that every benchmark means the same shapes."""

from typing import NamedTuple

LATENT, ROTATED, VALUE = 512, 64, 128  # of DeepSeek's attention: a latent, a rotated key, a head's value
INDEX_HEADS, INDEX_DIM = 64, 128  # of DeepSeek-V3.2's indexer


class LayerKind(NamedTuple):
    """What layers that are alike read and multiply beside their experts. Counts are of one layer."""

    layers: int
    attention: int  # elements of the matrices around attention, or of what stands in its place
    kv: int  # elements of a token's keys and values
    pair: int = 0  # multiplications of a query with one key and one value
    window: int = 0  # tokens that attention sees; 0: all
    state_bytes: int = 0  # of a sequence, read and written at every step
    token: int = 0  # multiplications with a state for each token
    dense: int = 0  # elements of an MLP that is there instead of experts


class ModelShape(NamedTuple):
    """What a decoder layer's kernels see of a model. Widths are in elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # width of an MLP's gate, of one expert's where there are experts
    vocab: int
    experts: int = 0
    top_k: int = 0  # experts per token
    qk_norm: bool = False
    tie: bool = False  # the head is the embedding table
    window: int = 0  # tokens that every second layer's attention sees; 0: all in all layers
    shared: int = 0  # experts that every token goes through besides
    query_rank: int = 0  # of latent attention, whose other sizes are DeepSeek-V3's; 0: this is none
    chosen: int = 0  # tokens that attention reads of a longer context, by an indexer's choice; 0: all
    own_kinds: tuple[LayerKind, ...] = ()  # of a model whose layers the numbers above do not describe

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_weights(self) -> int:
        """Elements of a layer's projections around attention."""
        if self.query_rank:
            down, up = self.query_rank + LATENT + ROTATED, self.heads * 2 * VALUE * LATENT
            if self.chosen:
                down += INDEX_DIM  # its queries and their weights only where there is something to choose
            return self.hidden * (down + self.heads * VALUE) + self.query_rank * self.q_width + up
        return self.hidden * (self.qkv_width + self.q_width)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """All layers. Latent attention's pairs are those of made keys and values, which a long prompt has."""
        if self.own_kinds:
            return self.own_kinds
        values = VALUE if self.query_rank else self.head_dim
        every = LayerKind(self.layers, self.attention_weights, self.kv_elements, self.heads * (self.head_dim + values))
        if not self.window:
            return (every,)
        half = every._replace(layers=self.layers // 2)
        return half, half._replace(layers=self.layers - half.layers, window=self.window)

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices that a step of many tokens reads."""
        attention = self.attention_weights
        mlp = 3 * self.hidden * self.inner
        return attention + (mlp * (self.experts + self.shared) + self.hidden * self.experts if self.experts else mlp)

    @property
    def kv_elements(self) -> int:
        """Elements of one token's keys and values in one layer."""
        if self.query_rank:
            return LATENT + ROTATED
        return 2 * self.kv_heads * self.head_dim


QWEN3_600M = ModelShape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, qk_norm=True, tie=True)
LLAMA_8B = ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256)
QWEN3_30B_A3B = ModelShape("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, 151936, experts=128, top_k=8, qk_norm=True)
LLAMA_70B = ModelShape("Llama-3.3-70B", 80, 8192, 64, 8, 128, 28672, 128256)
GPT_OSS_120B = ModelShape("gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088, experts=128, top_k=4, window=128)
GPT_OSS_20B = ModelShape("gpt-oss-20b", 24, 2880, 64, 8, 64, 2880, 201088, experts=32, top_k=4, window=128)
# the first 16 of GLM-4.5-Air's 45 layers with a mixture, which fit one GPU
GLM_AIR_16 = ModelShape("GLM-4.5-Air-16L", 16, 4096, 96, 8, 128, 1408, 151552, experts=128, top_k=8, shared=1)
# four of DeepSeek-V3's 58 layers with a mixture, which fit one GPU in bf16: 91 GB
DEEPSEEK_V3_4 = ModelShape(
    "DeepSeek-V3-4L", 4, 7168, 128, 128, 192, 2048, 129280, experts=256, top_k=8, shared=1, query_rank=1536
)
DEEPSEEK_V32_4 = DEEPSEEK_V3_4._replace(name="DeepSeek-V3.2-4L", chosen=2048)
MODELS = (QWEN3_600M, LLAMA_8B, QWEN3_30B_A3B)
DECODE_BATCHES = (1, 16, 64, 256, 512)
PREFILL_TOKENS = 8192
