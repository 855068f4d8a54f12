"""What a model file declares, and what it needs from a loader.

Owner: nobody, values only. Callers: models/*.py declare, models/registry.py finds, layers/decoder.py builds.
A model file names tensors as Hugging Face checkpoints do; loaders of other formats map their names to these.
A loader hands over `Parameters`: it is asked once for every tensor the model has, in layer order, so it may read
lazily, and it can report what it was never asked for (except `ModelDef.ignored`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from services.worker.models.caches import LayerCache, PagedKv
from services.worker.models.config import MOST as MOST
from services.worker.models.config import Config as Config
from services.worker.models.delta_spec import DeltaNames
from services.worker.models.delta_spec import DeltaSpec as DeltaSpec
from services.worker.models.spec_latent import LatentNames, LatentSpec
from services.worker.mtp_names import MtpNames as MtpNames
from services.worker.quant.contract import ExpertBiases, ExpertWeights, Weight

ROPE_KINDS: Mapping[str, tuple[str, ...]] = {  # and the parameters that each needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


class Parameters(Protocol):
    """A checkpoint as the model sees it. Names are full Hugging Face names, ending in `.weight` or `.bias`."""

    def weight(self, *names: str) -> Weight:
        """Matrices [out_i, in] of one linear layer (or one embedding), fused along out in the order given.

        Parts may be stored in different formats. Raises KeyError naming a missing tensor.
        """
        ...

    def tensor(self, *names: str, wide: bool = False) -> Tensor:
        """Norm weights, biases and routers: dense, in the model's activation dtype, concatenated along dimension 0.

        `wide`: in float32, whatever the activations are.
        """
        ...

    def experts(
        self, gate_up: Sequence[tuple[str, str]], down: Sequence[str], biases: ExpertBiases | None = None
    ) -> ExpertWeights:
        """The gated MLPs of one layer's experts, in their order: names of gate and up [I, N], and of down [N, I]."""
        ...

    def has(self, name: str) -> bool: ...


SLIDING, FULL = "sliding_attention", "full_attention"
MOST_EXPERTS = 1 << 16
MOST_ROPE = 1e15
ROPE_FLAGS = ("truncate",)  # may be 0


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding, rotate-half layout. `scaling` is the checkpoint's `rope_scaling`/`rope_parameters` values."""

    theta: float
    rotary_dim: int
    kind: str = "default"
    scaling: Mapping[str, float] | None = None
    max_position: int = 0  # as the checkpoint says, before a limit of the user


@dataclass(frozen=True)
class GroupedRouting:
    """In the best groups, by sigmoid scores and a learned correction (DeepSeek-V3) or by softmax scores (V2)."""

    num_groups: int
    top_groups: int
    scale: float  # of the chosen experts' weights
    softmax: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of gated MLPs in place of a layer's MLP. `renormalize`: a token's expert weights add up to 1."""

    num_experts: int
    top_k: int
    inner: int
    renormalize: bool
    dense_layers: tuple[int, ...] = ()  # these have an ordinary MLP
    router_bias: bool = False
    clamped: bool = False  # router and experts have biases, and these the gate of the op moe_clamped
    grouped: GroupedRouting | None = None  # None: softmax over all experts
    shared_inner: int = 0  # width of the MLP that every token goes through besides; 0: there is none
    shared_gate: bool = False  # a sigmoid of each token's own on that


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer with pre-norm layers, grouped-query attention and a gated MLP or a mixture of them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoeSpec | None = None
    activation: str = "silu"  # of an ordinary MLP: silu or gelu_tanh
    windows: tuple[int, ...] = ()  # by layer: a token sees itself and so many less one before it, 0: all; (): 0 in all
    local_rope: RopeSpec | None = None  # of the layers with a window, where it is another one
    sinks: bool = False  # a learned logit per head in the softmax's denominator
    value_dim: int = 0  # numbers of a value; 0: as many as of a key
    value_scale: float = 1.0
    window_kv_heads: int = 0  # of layers with a window, 0: as many as in others
    window_sinks: bool = False  # sinks are of layers with a window only
    attention_scale: float = 0.0  # 0: head_dim ** -0.5
    embed_scale: float = 1.0
    norm_offset: float = 0.0  # what the checkpoint's norm weights lack
    post_norms: bool = False  # attention's and the MLP's results are normed before they are added
    delta: DeltaSpec | None = None
    attention_gate: bool = False  # the projection of queries has behind each head's a gate of what it attends to
    latent: LatentSpec | None = None  # of latent attention; each head is a KV head then
    caches: tuple[LayerCache, ...] = ()  # what each layer keeps; (): keys and values of its KV heads
    mtp_layers: int = 0  # that the checkpoint has, for multi-token prediction
    mtp_window: int = 0  # of their attention, as in `windows`
    mtp_dense: bool = False  # they have an ordinary MLP
    with_mtp: int = 0  # so many of them are the last of `num_layers`

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """That of most layers, and of those with a window."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if layer < len(self.windows) else 0

    @property
    def trunk_layers(self) -> int:
        """Those through which every token goes."""
        return self.num_layers - self.with_mtp

    def kv_heads_of(self, layer: int) -> int:
        return self.window_kv_heads if self.window_kv_heads and self.window_of(layer) else self.num_kv_heads

    def has_sinks(self, layer: int) -> bool:
        return self.sinks and (not self.window_sinks or self.window_of(layer) > 0)

    @property
    def values_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def has_own_values(self) -> bool:
        """Values that are not as large as keys, or scaled."""
        return self.values_dim != self.head_dim or self.value_scale != 1.0

    def delta_of(self, layer: int) -> DeltaSpec | None:
        """None: the layer attends."""
        return self.delta if self.delta is not None and layer in self.delta.layers else None

    def cache_of(self, layer: int) -> LayerCache:
        if (delta := self.delta_of(layer)) is not None:
            return delta.cache
        own = PagedKv(self.kv_heads_of(layer), self.head_dim, self.values_dim, self.window_of(layer))
        if self.latent is not None:
            own = PagedKv(1, self.latent.row, 0)
        return self.caches[layer] if self.caches else own

    @property
    def attention_parity(self) -> int:
        """Tokens of context to which attending costs a token as many operations as its way through the layers."""
        attention = self.hidden_size * (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        per_token = 2 * self.num_heads * self.head_dim
        if self.latent is not None:
            attention, per_token = self.latent.costs(self.hidden_size, self.num_heads)
        weights = attending = 0
        for layer in range(self.num_layers):
            moe = self.experts_of(layer)
            inner = self.intermediate_size if moe is None else moe.top_k * moe.inner + moe.shared_inner
            delta = self.delta_of(layer)
            weights += (attention if delta is None else delta.weights(self.hidden_size)) + 3 * self.hidden_size * inner
            attending += delta is None
        # Two operations for each weight; for each token of context as many for the score and for the sum of values.
        return max(weights // (attending * per_token), 1)

    def experts_of(self, layer: int) -> MoeSpec | None:
        """None: the layer has an ordinary MLP."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe


@dataclass(frozen=True)
class ExpertStack:
    """Checkpoint names of tensors that hold all experts of a layer, [E, ...], where gate and up lie by turns.

    Dense ones are [E, in, out]; in MXFP4 they are `_blocks` [E, out, in / 32, 16] and `_scales`. A bias is `_bias`.
    """

    gate_up: str
    down: str


@dataclass(frozen=True)
class ExpertNames:
    """Checkpoint names of a mixture's parameters. `{i}` is the layer, `{e}` the expert."""

    router: str
    gate_up: tuple[str, str]
    down: str
    stack: ExpertStack | None = None  # where the parts of its tensors get the names above
    correction: str = ""  # of GroupedRouting
    shared_gate_up: tuple[str, str] = ("", "")
    shared_down: str = ""
    shared_gate: str = ""


@dataclass(frozen=True)
class DecoderNames:
    """Checkpoint names of a decoder's parameters. `{i}` is the layer; more than one name means fuse in that order."""

    embedding: str
    final_norm: str
    head: str
    input_norm: str
    qkv: tuple[str, str, str]
    out: str
    post_norm: str
    gate_up: tuple[str, str]
    down: str
    q_norm: str = ""
    k_norm: str = ""
    experts: ExpertNames | None = None
    sinks: str = ""
    after_attention: str = ""  # norms of DecoderSpec.post_norms
    after_mlp: str = ""
    delta: DeltaNames | None = None
    mtp: MtpNames | None = None
    latent: LatentNames | None = None


@dataclass(frozen=True)
class ModelDef:
    """One model file's declaration; the file's only public name is `MODEL`."""

    architectures: tuple[str, ...]
    features: tuple[str, ...]
    read: Callable[[Config], DecoderSpec]
    names: DecoderNames
    ignored: tuple[str, ...] = ()  # suffixes of checkpoint tensors that hold nothing to load
    # Prefixes of checkpoint tensors: what `names` has instead, or None for a part that is not served. {n}: of layers.
    prefixes: Mapping[str, str | None] = field(default_factory=dict)


# ModelDef.prefixes of models that have a language model beside other parts, in the names of several generations.
LANGUAGE_PART: Mapping[str, str | None] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    **{f"{root}{part}.": None for root in ("", "model.") for part in ("vision_tower", "multi_modal_projector")},
}


def read_rope(config: Config, rotary_dim: int, layers: str = FULL) -> RopeSpec:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    `layers`: which kind's, where the kinds have tables of their own. Raises ValueError for a kind of rope that
    layers/rope.py has no formula for.
    """
    own = config.mapping("rope_parameters")
    table = dict(config.mapping("rope_scaling")) | dict(Config(own).mapping(layers) or own)
    kind = table.pop("rope_type", None) or table.pop("type", None) or "default"
    table.pop("type", None)
    theta = table.pop("rope_theta", None) or config.get(float, "rope_theta", 10000.0)
    partial = table.pop("partial_rotary_factor", None) or config.get(float, "partial_rotary_factor", 1.0)
    if kind not in ROPE_KINDS:
        raise ValueError(f"config: rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    scaling = {}
    for key, value in table.items():
        if value is None:
            continue
        if not isinstance(value, int | float):
            raise ValueError(f"config: rope parameter {key!r} is {value!r}, expected a number")
        scaling[key] = float(value)
    if missing := [key for key in ROPE_KINDS[str(kind)] if key not in scaling]:
        raise ValueError(f"config: rope type {kind!r} needs {missing[0]!r}")
    if not isinstance(theta, int | float) or not isinstance(partial, int | float):
        raise ValueError(f"config: rope_theta is {theta!r}, partial_rotary_factor is {partial!r}, expected numbers")
    return RopeSpec(
        theta=float(theta),
        rotary_dim=int(rotary_dim * partial),
        kind=str(kind),
        scaling=scaling,
        max_position=config.get(int, "max_position_embeddings"),
    )


def read_windows(
    config: Config, slides: Callable[[int], bool] = lambda layer: True, even_if_wide: bool = False
) -> tuple[int, ...]:
    """DecoderSpec.windows from `sliding_window` and `layer_types`; without those layer i has a window if slides(i).

    A window that no position leaves is none, but `even_if_wide`. Raises ValueError.
    """
    size = config.get(int, "sliding_window", 0)
    if size < 0:
        raise ValueError(f"config: 'sliding_window' is {size}")
    kinds = config.get(list, "layer_types", []) or [SLIDING if slides(i) else FULL for i in range(config.num_layers)]
    if len(kinds) != config.num_layers:
        raise ValueError(f"config: 'layer_types' has {len(kinds)} entries for {config.num_layers} layers")
    if unknown := [kind for kind in kinds if kind not in (SLIDING, FULL)]:
        raise ValueError(f"config: 'layer_types' has {unknown[0]!r}, supported: {SLIDING}, {FULL}")
    wide = size >= config.get(int, "max_position_embeddings") and not even_if_wide
    if not size or wide or SLIDING not in kinds:
        return ()
    return tuple(size if kind == SLIDING else 0 for kind in kinds)


def read_moe(config: Config, num_experts: int, inner: int, renormalize: bool, **changes: Any) -> MoeSpec:
    """The keys that mixtures share; `changes` are the model's own fields of MoeSpec. Raises ValueError."""
    top_k = config.get(int, "num_experts_per_tok")
    if not 1 <= num_experts <= MOST_EXPERTS or not 1 <= inner <= MOST["intermediate_size"]:
        raise ValueError(f"config: {num_experts} experts of {inner} are not possible")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"config: 'num_experts_per_tok' is {top_k}, but there are {num_experts} experts")
    return MoeSpec(num_experts, top_k, inner, renormalize, **changes)


def read_decoder(config: Config, **changes: Any) -> DecoderSpec:
    """The keys that decoders share; `changes` are the model's own fields of DecoderSpec."""
    if "activation" not in changes:
        config.require("hidden_act", ("silu", "swish"))
    hidden_size = config.get(int, "hidden_size")
    num_heads = config.get(int, "num_attention_heads")
    num_kv_heads = config.get(int, "num_key_value_heads", num_heads)
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"config: {num_heads} query heads cannot share {num_kv_heads} KV heads")
    head_dim = config.get(int, "head_dim", hidden_size // num_heads)
    spec = DecoderSpec(
        vocab_size=config.get(int, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.get(int, "intermediate_size"),
        num_layers=config.get(int, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=config.get(float, "rms_norm_eps", 1e-6),
        rope=read_rope(config, head_dim),
        max_position=config.get(int, "max_position_embeddings"),
        tie_embeddings=config.get(bool, "tie_word_embeddings", False),
    )
    spec = replace(spec, **changes)
    check_sizes(spec)
    return spec


def check_sizes(spec: DecoderSpec) -> None:
    """Raises ValueError for a number that no model has: tables, loops and divisions follow from them."""
    for name, most in MOST.items():
        found = getattr(spec, name)
        if not 1 <= found <= most:
            raise ValueError(f"config: {name} is {found}, not between 1 and {most}")
    if not 0 <= spec.rms_eps < 1:
        raise ValueError(f"config: 'rms_norm_eps' is {spec.rms_eps}, not between 0 and 1")
    for rope in spec.ropes:
        if not 1 <= rope.rotary_dim <= spec.head_dim or rope.rotary_dim != spec.rope.rotary_dim:
            raise ValueError(f"config: rope of {rope.rotary_dim} in heads of {spec.head_dim}")
        for name, value in {"rope_theta": rope.theta, **(rope.scaling or {})}.items():
            if not 0 < value < MOST_ROPE and name not in ROPE_FLAGS:
                raise ValueError(f"config: rope parameter {name!r} is {value}, not between 0 and {MOST_ROPE:g}")
