"""Gives a model its parameters from checkpoint tensors: the `Parameters` that models/spec.py asks for.

`load_parameters` first holds the checkpoint against what the model declares, so that a wrong or incomplete one stops
before any weight is read. Each tensor is read once, when the model asks for it, straight into its final form: beside
the finished weights at most one parameter is in memory.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from common.errors import ConfigError
from services.worker.division import Division
from services.worker.models.spec import DecoderNames, DecoderSpec, ModelDef
from services.worker.models.spec_latent import bias_of, latent_shapes
from services.worker.quant.contract import ExpertBiases, ExpertWeights, StoredTensor, Weight
from services.worker.quant.registry import Use, WeightPolicy
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
) -> "CheckpointParameters":
    """The parameters of `model` as `spec` describes it, or one rank's share of them.

    Raises ConfigError naming tensors at fault and their files.
    """
    tensors = served_tensors(tensors, model, spec)
    expected = expected_shapes(spec, model.names)
    # A tied head that the checkpoint repeats is the embedding once more.
    check_tensors(tensors, expected, (*model.ignored, model.names.head) if spec.tie_embeddings else model.ignored)
    use: Use = "tied" if spec.tie_embeddings else "embedding"
    return CheckpointParameters(
        {name: tensors[name] for name in expected}, policy, {model.names.embedding: use}, report, division
    )


class CheckpointParameters:
    """Reads each tensor on request; see `Parameters` in models/spec.py."""

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        policy: WeightPolicy,
        uses: Mapping[str, Use],
        report: Report,
        division: Division | None = None,
    ) -> None:
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
        values = torch.cat([part.dense(dtype) for part in parts]).to(self._policy.device)
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
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (spec.vocab_size, hidden), names.final_norm: (hidden,)}
    if not spec.tie_embeddings:
        shapes[names.head] = (spec.vocab_size, hidden)
    attention: list[tuple[str, int, int, bool]] = [
        *(
            (name, rows, hidden, spec.qkv_bias)
            for name, rows in zip(names.qkv, (q_rows, kv_rows, kv_rows), strict=True)
        ),
        (names.out, hidden, q_rows, spec.out_bias),
    ]
    if (latent := spec.latent) is not None:
        attention = [(names.out, hidden, spec.num_heads * latent.value_dim, spec.out_bias)]
    for i in range(spec.num_layers):
        if latent is not None and names.latent is not None:
            sizes = hidden, spec.num_heads, spec.vocab_size
            shapes |= latent_shapes(latent, names.latent, names.qkv[0], i, *sizes)
        shapes[names.input_norm.format(i=i)] = (hidden,)
        shapes[names.post_norm.format(i=i)] = (hidden,)
        if spec.post_norms:
            shapes |= {name.format(i=i): (hidden,) for name in (names.after_attention, names.after_mlp)}
        if spec.sinks:
            shapes[names.sinks.format(i=i)] = (spec.num_heads,)
        moe, experts = spec.experts_of(i), names.experts
        if moe is not None and experts is not None and moe.grouped is not None and not moe.grouped.softmax:
            shapes[experts.correction.format(i=i)] = (moe.num_experts,)
        if spec.qk_norm:
            shapes[names.q_norm.format(i=i)] = (spec.head_dim,)
            shapes[names.k_norm.format(i=i)] = (spec.head_dim,)
        for name, rows, columns, has_bias in attention + _mlp_shapes(spec, names, i):
            shapes[name.format(i=i)] = (rows, columns)
            if has_bias:
                shapes[bias_of(name.format(i=i))] = (rows,)
    return shapes


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
    return shapes


def served_tensors(
    tensors: Mapping[str, StoredTensor], model: ModelDef, spec: DecoderSpec
) -> Mapping[str, StoredTensor]:
    """The checkpoint's tensors under the names that the model declares: parts not served left out, stacks unstacked."""
    prefixes = {prefix.format(n=spec.num_layers): ours for prefix, ours in model.prefixes.items()}
    served: dict[str, StoredTensor] = {}
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
