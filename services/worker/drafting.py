"""Which drafts there are, from the settings: chosen once at start by the engine, put into each runner by startup.py."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from common.config import Speculative
from common.errors import ConfigError
from services.worker import memory
from services.worker.drafts import Drafts
from services.worker.kernels.registry import Bindings
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.mtp import with_mtp
from services.worker.layers.rope import RopeTable
from services.worker.models.caches import LayerCache, PagedKv
from services.worker.models.spec import DecoderSpec
from services.worker.mtp_names import MtpNames
from services.worker.proposers import model_drafts, mtp_drafts, ngram_drafts


def caches_of(spec: DecoderSpec) -> list[LayerCache]:
    return [spec.cache_of(layer) for layer in range(spec.num_layers)]


def has_full_pages(spec: DecoderSpec) -> bool:
    return any(isinstance(kept, PagedKv) and not kept.window for kept in caches_of(spec))


class Site(NamedTuple):
    """The runner's parts that drafts are made beside."""

    model: Decoder
    cache: KvCache
    rope: RopeTable
    bindings: Bindings


class Drafting(NamedTuple):
    """`tokens`: drafts of a row, at most; `make`: what proposes them, for one runner."""

    tokens: int
    make: Callable[[Site], Drafts]
    block_bytes: int = 0  # of a KV block, for a model of their own
    spare: int = 0  # KV blocks that the scheduler does not know


class Smaller(NamedTuple):
    """A draft model on the device."""

    model: Decoder
    bindings: Bindings
    kv_dtype: torch.dtype


def choose_drafting(
    config: Speculative, target: Decoder, shape: memory.Shape, load: Callable[[str], Smaller]
) -> Drafting | None:
    """`load` reads the model of a source. Raises ConfigError for settings that do not go together."""
    if bool(config.model) is not (config.method == "draft"):
        raise ConfigError(
            f'speculative.model is "{config.model}" and speculative.method "{config.method}": '
            f'a draft model needs both, the method then being "draft"'
        )
    if config.method == "ngram":
        shortest, longest = config.ngram_min, config.ngram_max
        if longest < shortest:
            raise ConfigError(f"speculative.ngram_max is {longest}, less than speculative.ngram_min, {shortest}")
        return Drafting(config.drafts, lambda site: ngram_drafts(site.bindings, shortest, longest))
    if config.method == "mtp":
        return Drafting(
            config.drafts, lambda site: mtp_drafts(site.bindings, site.model, site.cache, site.rope), spare=1
        )
    return _by_model(config, target, shape, load(config.model)) if config.method == "draft" else None


def with_drafts(spec: DecoderSpec, config: Speculative, mtp: MtpNames | None, tensors: Iterable[str]) -> DecoderSpec:
    """The model as it is served with these drafts: its heads for them are layers more, as many as there are drafts and
    the checkpoint of these tensors has, and what states lack of them lies beside the states. Raises ValueError."""
    if config.method == "mtp":
        spec = with_mtp(spec, min(mtp.heads(tensors), config.drafts) if mtp is not None else 1)
    return replace(spec, delta=replace(spec.delta, drafts=config.drafts)) if spec.delta is not None else spec


def _by_model(config: Speculative, target: Decoder, shape: memory.Shape, smaller: Smaller) -> Drafting:
    model, bindings, kv_dtype = smaller
    spec, size = model.spec, target.spec.vocab_size
    if spec.vocab_size != size:
        raise ConfigError(f"speculative.model has {spec.vocab_size} token ids, the model {size}: they must be the same")
    if spec.max_position < shape.max_len:
        raise ConfigError(
            f"speculative.model was made for at most {spec.max_position} tokens, the model runs {shape.max_len}: "
            f"lower model.max_len"
        )
    if not has_full_pages(target.spec):
        raise ConfigError(
            "every layer of the model has a window, whose pages are given back; a draft model needs pages that stay: "
            "use speculative.method ngram"
        )
    pages = {replace(kept, window=0) if isinstance(kept, PagedKv) else kept for kept in caches_of(spec)}
    if len(pages) > 1 or not all(isinstance(kept, PagedKv) and kept.value_dim in (0, kept.key_dim) for kept in pages):
        raise ConfigError(
            "speculative.model has layers that keep a state, or keys and values of unlike sizes, which a draft model "
            "may not: choose one whose layers are alike"
        )
    rope = RopeTable(spec.ropes, shape.max_len, model.final_norm.weight)

    def make(site: Site) -> Drafts:
        storage = memory.zeros(
            KvCache.shape(spec, site.cache.num_blocks, shape.block_tokens), kv_dtype, site.cache.storage.device
        )
        return model_drafts(bindings, model, KvCache(storage, layout=bindings.layout), rope)

    block_bytes = math.prod(KvCache.shape(spec, 1, shape.block_tokens)) * kv_dtype.itemsize
    return Drafting(config.drafts, make, block_bytes, spare=1)
