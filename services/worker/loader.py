"""Gives a model its parameters from checkpoint tensors: the `Parameters` that models/spec.py asks for.

`load_parameters` first holds the checkpoint against what the model declares, so that a wrong or incomplete one stops
before any weight is read. Each tensor is read once, when the model asks for it, straight into its final form: beside
the finished weights at most one parameter is in memory.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from common.errors import ConfigError
from services.worker.division import Division
from services.worker.models.delta_spec import delta_shapes
from services.worker.models.spec import DecoderNames, DecoderSpec, ModelDef
from services.worker.models.spec_latent import bias_of, latent_shapes
from services.worker.quant.assemble import assemble, take_kv_scales
from services.worker.quant.by_head import by_head
from services.worker.quant.contract import ExpertBiases, ExpertWeights, StoredTensor, Weight
from services.worker.quant.registry import Use, WeightPolicy
from services.worker.quant.rules import Rules
from services.worker.quant.stacked import unstack

MAX_NAMED = 5  # tensors listed in one error
Report = Callable[[int, int], None]  # parameters done, parameters in all


def load_parameters(
    tensors: Mapping[str, StoredTensor],
    model: ModelDef,
    spec: DecoderSpec,
    policy: WeightPolicy,
    report: Report = lambda done, total: None,
    division: Division | None = None,
    rules: Rules | None = None,
) -> "CheckpointParameters":
    """The parameters of `model` as `spec` describes it, or one rank's share of them. `rules`: which are coded how.

    Raises ConfigError naming tensors at fault and their files.
    """
    served = served_tensors(tensors, model, spec)
    expected = expected_shapes(spec, model.names)
    kv_scales = take_kv_scales(served)
    tensors = assemble(served, expected, rules)
    # A tied head that the checkpoint repeats is the embedding once more.
    ignored = (*model.ignored, model.names.head) if spec.tie_embeddings else model.ignored
    if spec.with_mtp and model.names.mtp is not None:
        ignored = (*ignored, *(name.format(i=spec.trunk_layers) for name in model.names.mtp.repeated))
    check_tensors(tensors, expected, ignored)
    uses: dict[str, Use] = {model.names.embedding: "tied" if spec.tie_embeddings else "embedding"}
    if not spec.tie_embeddings:
        uses[model.names.head] = "head"
    own = {name: tensors[name] for name in expected}
    return CheckpointParameters(own, policy, uses, report, division, kv_scales)


class CheckpointParameters:
    """Reads each tensor on request; see `Parameters` in models/spec.py."""

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        policy: WeightPolicy,
        uses: Mapping[str, Use],
        report: Report,
        division: Division | None = None,
        kv_scales: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        """`kv_scales`: what the checkpoint says of its keys and values, by layer."""
        self.kv_scales = dict(kv_scales or {})
        self._tensors = tensors
        self._division = division
        self._policy = policy
        self._uses = uses
        self._report = report
        self._done: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def weight(self, *names: str) -> Weight:
        weight = self._policy.make([self._part(name) for name in names], self._uses.get(names[0], "linear"))
        self._count(names)
        return weight if self._division is None else self._division.join(names[0], weight)

    def experts(
        self, gate_up: Sequence[tuple[str, str]], down: Sequence[str], biases: ExpertBiases | None = None
    ) -> ExpertWeights:
        pairs = [[self._part(name) for name in names] for names in gate_up]
        experts = self._policy.make_experts(pairs, [self._part(name) for name in down], biases)
        self._count((*(name for names in gate_up for name in names), *down))
        return experts if self._division is None else self._division.join_experts(experts)

    def tensor(self, *names: str, wide: bool = False) -> torch.Tensor:
        parts = [self._part(name) for name in names]
        dtype = torch.float32 if wide else self._policy.activation
        values = torch.cat([part.dense(dtype).to(self._policy.device) for part in parts])
        if not bool(torch.isfinite(values).all()):
            raise ConfigError(f"{parts[0].source}: {', '.join(names)} holds NaN or infinite values")
        self._count(names)
        return values

    def _part(self, name: str) -> StoredTensor:
        tensor = self._tensors[name]
        return tensor if self._division is None else self._division.part(name, tensor)

    def unread(self) -> list[str]:
        """Tensors that the model declared but did not ask for."""
        return sorted(set(self._tensors) - self._done)

    def _count(self, names: tuple[str, ...]) -> None:
        self._done.update(names)
        self._report(len(self._done), len(self._tensors))


def expected_shapes(spec: DecoderSpec, names: DecoderNames) -> dict[str, tuple[int, ...]]:
    """Every checkpoint tensor that a decoder has, by name, with its shape."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (spec.vocab_size, hidden), names.final_norm: (hidden,)}
    if not spec.tie_embeddings:
        shapes[names.head] = (spec.vocab_size, hidden)
    latent = spec.latent
    for i in range(spec.num_layers):
        if latent is not None and names.latent is not None:
            sizes = hidden, spec.num_heads, spec.vocab_size
            shapes |= latent_shapes(latent, names.latent, names.qkv[0], i, *sizes)
        shapes[names.input_norm.format(i=i)] = (hidden,)
        shapes[names.post_norm.format(i=i)] = (hidden,)
        if spec.post_norms:
            shapes |= {name.format(i=i): (hidden,) for name in (names.after_attention, names.after_mlp)}
        delta = spec.delta_of(i)
        if delta is not None and names.delta is not None:
            shapes |= {name.format(i=i): shape for name, shape in delta_shapes(delta, names.delta, hidden)}
        if spec.has_sinks(i):
            shapes[names.sinks.format(i=i)] = (spec.num_heads,)
        moe, experts = spec.experts_of(i), names.experts
        if moe is not None and experts is not None and moe.grouped is not None and not moe.grouped.softmax:
            shapes[experts.correction.format(i=i)] = (moe.num_experts,)
        if spec.qk_norm and delta is None:
            shapes[names.q_norm.format(i=i)] = (spec.head_dim,)
            shapes[names.k_norm.format(i=i)] = (spec.head_dim,)
        for name, rows, columns, has_bias in _attention_shapes(spec, names, i) + _mlp_shapes(spec, names, i):
            shapes[name.format(i=i)] = (rows, columns)
            if has_bias:
                shapes[bias_of(name.format(i=i))] = (rows,)
    if spec.with_mtp and (mtp := names.mtp) is not None:
        i = spec.trunk_layers
        shapes |= {name.format(i=i): (hidden,) for name in (mtp.embed_norm, mtp.hidden_norm, mtp.final_norm)}
        shapes[mtp.project.format(i=i)] = (hidden, 2 * hidden)
    return shapes


def _attention_shapes(spec: DecoderSpec, names: DecoderNames, layer: int) -> list[tuple[str, int, int, bool]]:
    """As _mlp_shapes, of a layer that attends."""
    if spec.delta_of(layer) is not None:
        return []
    if spec.latent is not None:
        return [(names.out, spec.hidden_size, spec.num_heads * spec.latent.value_dim, spec.out_bias)]
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads, spec.kv_heads_of(layer)
    q_rows = heads * spec.head_dim * (2 if spec.attention_gate else 1)
    rows = q_rows, kv_heads * spec.head_dim, kv_heads * spec.values_dim
    qkv = [(name, count, hidden, spec.qkv_bias) for name, count in zip(names.qkv, rows, strict=True)]
    return [*qkv, (names.out, hidden, heads * spec.values_dim, spec.out_bias)]


def _mlp_shapes(spec: DecoderSpec, names: DecoderNames, layer: int) -> list[tuple[str, int, int, bool]]:
    """Name, rows, columns, whether there is a bias, of each matrix of the layer's MLP or mixture."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    moe, experts = spec.experts_of(layer), names.experts
    if moe is None or experts is None:
        gate_up = [(name, inner, hidden, spec.mlp_bias) for name in names.gate_up]
        return [*gate_up, (names.down, hidden, inner, spec.mlp_bias)]
    shapes = [(experts.router, moe.num_experts, hidden, moe.clamped)]
    for e in range(moe.num_experts):
        shapes += [(name.format(i=layer, e=e), moe.inner, hidden, moe.clamped) for name in experts.gate_up]
        shapes.append((experts.down.format(i=layer, e=e), hidden, moe.inner, moe.clamped))
    if moe.shared_inner:
        shapes += [(name, moe.shared_inner, hidden, spec.mlp_bias) for name in experts.shared_gate_up]
        shapes.append((experts.shared_down, hidden, moe.shared_inner, spec.mlp_bias))
    if moe.shared_gate:
        shapes.append((experts.shared_gate, 1, hidden, False))
    return shapes


def served_tensors(tensors: Mapping[str, StoredTensor], model: ModelDef, spec: DecoderSpec) -> dict[str, StoredTensor]:
    """The checkpoint's tensors under the names that the model declares: parts not served left out, stacks unstacked."""
    prefixes = {prefix.format(n=spec.num_layers): ours for prefix, ours in model.prefixes.items()}
    if spec.with_mtp and (mtp := model.names.mtp) is not None:
        prefixes = {prefix: ours and ours.format(i=spec.trunk_layers) for prefix, ours in mtp.stored.items()} | {
            prefix: ours for prefix, ours in prefixes.items() if prefix not in mtp.stored
        }
    served: dict[str, StoredTensor] = {}
    embedding, root = model.names.embedding, "model."
    if embedding not in tensors and embedding.removeprefix(root) in tensors:  # saved without a head, to give vectors
        tensors = {root + name: tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        ours = "" if prefix is None else prefixes[prefix]
        if ours is not None:
            served[ours + name.removeprefix(prefix or "")] = tensor
    if (experts := model.names.experts) is not None and (stack := experts.stack) is not None:
        for i in range(spec.num_layers):
            names = [name.format(i=i, e="{e}") for name in (*experts.gate_up, experts.down)]
            unstack(served, stack.gate_up.format(i=i), (names[0], names[1]))
            unstack(served, stack.down.format(i=i), (names[2],))
    if spec.delta is not None and model.names.delta is not None:
        for i in spec.delta.layers:
            by_head(served, model.names.delta.conv.format(i=i), spec.delta.heads, spec.delta.convolved)
    return served


def check_tensors(
    tensors: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], ignored: tuple[str, ...]
) -> None:
    """Raises ConfigError unless `tensors` are exactly those `expected`, but for names ending in one of `ignored`."""
    files = ", ".join(sorted({tensor.source.partition(' ("')[0] for tensor in tensors.values()})[:MAX_NAMED])
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ConfigError(f"the checkpoint lacks {_listed(missing)} (looked in {files or 'no file'})")
    for name, shape in expected.items():
        found = tensors[name].shape
        if found != shape:
            raise ConfigError(
                f'{tensors[name].source}: tensor "{name}" has shape {list(found)}, the configuration says {list(shape)}'
            )
    surplus = [name for name in tensors if name not in expected and not name.endswith(ignored)]
    if surplus:
        raise ConfigError(f"the model has no place for {_listed(surplus)} of {tensors[surplus[0]].source}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(f'"{name}"' for name in names[:MAX_NAMED]) + more
