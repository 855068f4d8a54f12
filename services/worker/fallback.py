"""Architectures without a file of ours: transformers' own model, with the paged attention of the bound ops put in.

Slower than a model file: nothing is fused, compiled or captured. What goes through transformers' attention interface
with heads of one size can run so; at the start the model is held against transformers' eager attention on its own
weights, so that one with other state (recurrent, convolutional) or other attention is refused. Called by the engine.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common import config as configuration
from common.errors import ConfigError
from services.worker.groups import GroupStep, Layout, Storage, plain
from services.worker.kernels.ops.kv_write import kv_write
from services.worker.kernels.ops.paged_attention import (
    AttentionRows,
    AttentionSpec,
    make_attention_rows,
    paged_attention,
)
from services.worker.kernels.registry import Bindings
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import Rotation
from services.worker.models.registry import find_model
from services.worker.models.spec import Config, DecoderNames, DecoderSpec, ModelDef, RopeSpec, check_sizes
from services.worker.quant.contract import Norm

log = logging.getLogger("worker")
NAME = "valence_paged"
CHECKED_TOKENS = (11, 12, 1)  # of the test at the start, in steps
NEAR = 0.05  # relative error of all its logits; in 16 bits that of an exact model is below 0.02


def find(architectures: Sequence[str], settings: configuration.Config) -> tuple[str, ModelDef]:
    """The model file's declaration, else MODEL if transformers knows one of them. Raises ValueError."""
    try:
        return find_model(architectures)
    except ValueError:
        from transformers.models.auto import modeling_auto

        known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in architectures:
            if name in known:
                if settings.model.weights == "random" or settings.worker.tensor_parallel > 1:
                    raise ValueError(f"{name} has no model file: no random weights, and one rank only") from None
                return name, MODEL
        raise


def read(values: Config) -> DecoderSpec:
    """What the cache and the ops must know. Raises ValueError."""
    config = values.text
    hidden, heads = config.get(int, "hidden_size"), config.get(int, "num_attention_heads")
    if heads < 1 or config.get(int, "num_key_value_heads", heads) < 1:
        raise ValueError(f"config: {heads} query heads are not possible")
    head_dim = config.get(int, "head_dim", hidden // heads)
    positions = config.get(int, "max_position_embeddings")
    spec = DecoderSpec(
        vocab_size=config.get(int, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.get(int, "intermediate_size", 4 * hidden),
        num_layers=config.num_layers,
        num_heads=heads,
        num_kv_heads=config.get(int, "num_key_value_heads", heads),
        head_dim=head_dim,
        rms_eps=0.0,
        rope=RopeSpec(1e4, 2),  # transformers rotates
        max_position=positions,
        tie_embeddings=False,
        # whether and where there is one only its own code knows; ops without a window are not chosen then
        windows=(config.get(int, "sliding_window", 0),) * config.num_layers,
    )
    check_sizes(spec)
    return spec


# transformers knows its tensors' names itself
MODEL = ModelDef(
    (), ("whatever transformers can",), read, DecoderNames("", "", "", "", ("", "", ""), "", "", ("", ""), "")
)


class Paged(NamedTuple):
    """What the attention of one step needs besides its inputs; goes through transformers as a keyword."""

    cache: KvCache
    slots: Tensor
    rows: AttentionRows
    write: Any
    attend: Any


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query [1, H, T, D]; key, value [1, K, T, D]; returns [1, T, H, D]."""
    paged: Paged = others["paged"]
    keys, values, scale = paged.cache.layers[module.layer_idx]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    paged.write(k, v, keys, values, paged.slots, scale)
    sinks = others.get("s_aux")
    spec = AttentionSpec(
        scale=q.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=others.get("sliding_window") or 0,
        softcap=others.get("softcap") or 0.0,
        sinks=None if sinks is None else sinks.float(),
        kv_scale=scale,
    )
    return paged.attend(q, keys, values, paged.rows, spec)[None], None


def positions_of(rows: AttentionRows, num_tokens: int) -> Tensor:
    """int64 [T]: a row's tokens are the last of its context."""
    starts = rows.query_starts.long()
    shift = rows.context_lens.long() - starts.diff() - starts[:-1]
    return torch.arange(num_tokens, device=starts.device) + shift.repeat_interleave(
        starts.diff(), output_size=num_tokens
    )


class TransformersDecoder(Decoder):
    """A Decoder that gives logits where ours gives the residual stream."""

    compiles = gives_hidden = False

    def __init__(self, spec: DecoderSpec, model: Any, bindings: Bindings) -> None:
        self.spec, self.model = spec, model
        self.final_norm = Norm(next(model.parameters()), 0.0)  # dtype and device of activations
        self._write, self._attend = bindings(kv_write), bindings(paged_attention)

    def __call__(
        self,
        token_ids: Tensor,
        rotations: Sequence[Rotation],
        slots: Tensor,
        rows: AttentionRows,
        cache: KvCache,
        outputs: Tensor | None,
        beside: Sequence[GroupStep] = (),
    ) -> Tensor:
        paged = Paged(cache, slots, rows, self._write, self._attend)
        positions = positions_of(rows, len(token_ids))
        kept = outputs if outputs is not None else torch.arange(len(token_ids), device=token_ids.device)
        result = self.model(
            input_ids=token_ids.long()[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=kept,
            paged=paged,
        )
        logits: Tensor = result.logits[0]
        return logits

    def layout(self, block_tokens: int, storage: Storage, every: int = 0) -> Layout:
        """Which layer has a window is not known, so all keep all."""
        return plain([self.spec.cache_of(layer) for layer in range(self.spec.num_layers)])

    def logits(self, x: Tensor) -> Tensor:
        return x


def load(
    architecture: str,
    folder: Path,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    bindings: Bindings,
) -> Decoder:
    """From safetensors in `folder`. Raises ConfigError for a model that cannot run so."""
    import transformers

    transformers.AttentionInterface.register(NAME, attend)
    # its class by name, not by what the folder says: no code of a checkpoint's runs
    kind = getattr(transformers, architecture)
    try:
        model = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, use_safetensors=True)
        model = model.eval().requires_grad_(False).to(device)
        if not model._supports_attention_backend:
            raise ValueError(f"{architecture} does not go through transformers' attention interface")
        decoder = TransformersDecoder(spec, model, bindings)
        hold(decoder, bindings.layout)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{folder}: {error}") from error
    log.warning("%s runs by transformers with our paged attention: slower than a model file", architecture)
    return decoder


@torch.inference_mode()
def hold(decoder: TransformersDecoder, layout: str) -> None:
    """Raises ValueError unless steps over pages give what one pass of transformers' eager attention does."""
    model, spec, total = decoder.model, decoder.spec, sum(CHECKED_TOKENS)
    device, dtype = decoder.final_norm.weight.device, decoder.final_norm.weight.dtype
    ids = (torch.arange(total, device=device) * 7 + 3) % spec.vocab_size
    model.set_attn_implementation("eager")
    wanted = model(input_ids=ids[None], use_cache=False).logits[0].float()
    model.set_attn_implementation(NAME)
    cache = KvCache(torch.zeros(KvCache.shape(spec, 3, 16), dtype=dtype, device=device), layout=layout)
    parts, done = [], 0
    try:
        for count in CHECKED_TOKENS:
            rows = make_attention_rows([count], [done + count], [[2, 0]], 16)
            moved = rows if device.type == "cpu" else _moved(rows, device)
            places = torch.arange(done, done + count, device=device)
            slots = torch.where(places < 16, places + 32, places - 16)
            parts.append(decoder(ids[done : done + count], (), slots, moved, cache, None).float())
            done += count
    except (KeyError, IndexError, RuntimeError) as error:
        raise ValueError(f"{type(model).__name__} cannot run with paged attention: {error}") from error
    found = torch.cat(parts)
    distance = float((found - wanted).norm() / wanted.norm())
    if not distance < NEAR:
        raise ValueError(
            f"{type(model).__name__} with paged attention is {distance:.0%} away from itself with transformers' own: "
            "it keeps a state besides keys and values, or attends in another way"
        )


def _moved(rows: AttentionRows, device: torch.device) -> AttentionRows:
    return replace(
        rows,
        query_starts=rows.query_starts.to(device),
        context_lens=rows.context_lens.to(device),
        block_tables=rows.block_tables.to(device),
    )
