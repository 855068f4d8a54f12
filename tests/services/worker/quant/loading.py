"""Loads a small checkpoint as the worker does, and asks it for logits. For tests of coded weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.worker.division import Division
from services.worker.kernels.ops.paged_attention import make_attention_rows
from services.worker.kernels.registry import Bindings, Facts, bind
from services.worker.layers.decoder import Decoder, build_decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.rope import RopeTable
from services.worker.loader import CheckpointParameters, load_parameters
from services.worker.models.registry import find_model
from services.worker.models.spec import Config
from services.worker.quant.coding import read_coding
from services.worker.quant.registry import choose_policy
from services.worker.shares import Rank, local_spec
from services.worker.source import open_model

BINDINGS = bind(("torch",), Facts("cpu"))
PROMPT = [(7 * i * i + 3) % 131 for i in range(40)]


def load(
    folder: Path, dtype: str = "float32", quantize: str = "", rank: Rank | None = None, bindings: Bindings = BINDINGS
) -> tuple[Decoder, CheckpointParameters]:
    """Every tensor must have been asked for."""
    source = open_model(str(folder))
    architectures: Any = source.config["architectures"]
    _, model = find_model(architectures)
    spec = model.read(Config(source.config))
    coding = read_coding(source.config, str(folder), quantize)
    policy = choose_policy(dtype, bindings=bindings, quantize=quantize)
    division = None
    local = spec
    if rank is not None:
        rank = rank._replace(unit=coding.unit)
        division, local = Division(spec, model.names, rank, bindings), local_spec(spec, rank)
    parameters = load_parameters(source.tensors, model, spec, policy, division=division, rules=coding.rules)
    decoder = build_decoder(local, model, parameters, bindings)
    assert parameters.unread() == []
    return decoder, parameters


@torch.inference_mode()
def logits(decoder: Decoder, cache: KvCache | None = None) -> Tensor:
    """Of every position of PROMPT, in two chunks."""
    spec = decoder.spec
    cache = cache or KvCache(torch.zeros(KvCache.shape(spec, 4, 16)))
    rope = RopeTable(spec.ropes, 64, decoder.final_norm.weight)
    parts, done = [], 0
    for count in (24, 16):
        rows = make_attention_rows([count], [done + count], [[2, 0, 1]], 16)
        places = torch.arange(done, done + count)
        slots = torch.tensor([2, 0, 1])[places // 16] * 16 + places % 16
        x = decoder(torch.tensor(PROMPT[done : done + count]), rope.at(places), slots, rows, cache, None)
        parts.append(decoder.logits(x))
        done += count
    return torch.cat(parts)


def as_if_by(provider: str, *ops: str) -> Bindings:
    """The meanings, which a table says are that provider's: what formats ask is who runs an op."""
    table = [row._replace(provider=provider) if row.op in ops else row for row in BINDINGS.table]
    return Bindings(table, {row.op: BINDINGS._chosen[row.op] for row in table})
