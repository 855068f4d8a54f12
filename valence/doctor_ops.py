"""The ops of a model as a worker would bind them on this host, self-tested, for `valence doctor`. Imports torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from common.config import Config
from common.errors import ConfigError
from services.worker import compile as levels
from services.worker.binding import Bench, bind_tested
from services.worker.builders import cache_root, open_aiter
from services.worker.kernels.gpu_arch import arch_of
from services.worker.kernels.registry import BindError, Binding
from services.worker.layers.kv_cache import storage_dtype
from services.worker.model_engine import choose_device, facts_of
from services.worker.models import spec as models
from services.worker.models.registry import find_model
from services.worker.quant.registry import activation_dtype
from services.worker.self_test import Verdict
from services.worker.source import open_model
from valence.doctor import Host, OpRow

Report = Callable[[str, int], None]


def with_ops(host: Host, config: Config, tests: bool, again: bool, report: Report) -> Host:
    """The host with the table of ops; what keeps it from being made is the host's trouble."""
    wanted = "on" if tests else "off"
    config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, self_test=wanted))
    try:
        name, rows = _table(config, again, report)
    except (ConfigError, BindError, ValueError) as error:
        return replace(host, model=config.model.source, ops_trouble=str(error))
    return replace(host, model=name, ops=rows)


def _table(config: Config, again: bool, report: Report) -> tuple[str, list[OpRow]]:
    device = choose_device(config.worker.device)
    arch = arch_of(device)
    source = open_model(config.model.source, with_tensors=False)
    values = models.Config(source.config)
    spec = find_model(values.get(list, "architectures"))[1].read(values)
    activation = activation_dtype(config.model.dtype, device)
    kv_dtype = storage_dtype(config.kv.dtype, activation, arch)
    facts = facts_of(device, activation, spec, config.kv.block_tokens, kv_dtype)
    cache = open_aiter(config, arch, cache_root(config))
    bench = Bench(device, cache_root(config), cache.folder if cache else None, again=again, uncalled=True)
    level = levels.choose_level(config.worker.compile_level, device)
    bindings, verdicts = bind_tested(config, facts, spec, level, bench, report)
    name = f"{source.name} on {arch or 'the CPU'}, activations {facts.dtype}, KV cache {kv_dtype}".replace("torch.", "")
    return name, [OpRow(*row, said(row, verdicts)) for row in bindings.table]


def said(row: Binding, verdicts: Sequence[Verdict]) -> str:
    """What the self-test said about the provider that is bound."""
    if row.provider == "torch":
        return "is the meaning"
    for verdict in verdicts:
        if (verdict.op, verdict.provider) == (row.op, row.provider):
            return f"{verdict.cases} cases right" if verdict.cases else "no case of this model"
    return "not tested"
