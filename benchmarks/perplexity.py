"""What formats cost in quality: perplexity of a model on a text, for each format of weights and of the KV cache.

The text that ships is the beginning of Lewis Carroll's "Alice's Adventures in Wonderland" (1865, public domain). The
exact mode is the measure of all others: perplexity, and how far logits are from it (mean KL divergence per token).

    python -m benchmarks.perplexity --json perplexity.json
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.config import Model
from services.tokenizer import source as tokenizers
from services.worker.kernels.ops.kv_write import KvScale
from services.worker.kernels.ops.paged_attention import make_attention_rows
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.decoder import Decoder, build_decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.kv_scales import KvScales
from services.worker.layers.rope import RopeTable
from services.worker.loader import load_parameters
from services.worker.memory import zeros
from services.worker.models.registry import find_model
from services.worker.models.spec import Config
from services.worker.quant.detect import read_rules
from services.worker.quant.registry import choose_policy
from services.worker.source import open_model

TEXT = Path(__file__).parents[1] / "tests/services/worker/quant/alice.txt"
PAGE = 16
CPU = torch.device("cpu")


class Variant(NamedTuple):
    name: str
    dtype: str = "float32"
    quantize: str = ""
    kv: str = "auto"


VARIANTS = (
    Variant("float32"),
    Variant("bfloat16", "bfloat16"),
    *(Variant(name, quantize=name) for name in ("fp8", "fp8_block", "int8", "int4", "mxfp4")),
    Variant("KV fp8", kv="fp8"),
    Variant("KV fp8_per_token_head", kv="fp8_per_token_head"),
)


class Figures(NamedTuple):
    perplexity: float
    kl: float  # nats per token, of the exact mode's distribution from this one
    bits: float  # per parameter of linear layers


def load(source: str, variant: Variant) -> tuple[Decoder, float]:
    """And the bits that a parameter of a linear layer takes."""
    opened, bindings = open_model(source), bind(("torch",), Facts("cpu"))
    architectures: Any = opened.config["architectures"]
    _, model = find_model(architectures)
    spec = model.read(Config(opened.config))
    rules = read_rules(opened.config, source)
    policy = choose_policy(variant.dtype, CPU, bindings, variant.quantize)
    parameters = load_parameters(opened.tensors, model, spec, policy, rules=rules)
    decoder = build_decoder(spec, model, parameters, bindings)
    weights = [layer.attention.out.weight for layer in decoder.layers]
    return decoder, sum(w.num_bytes for w in weights) * 8 / sum(w.out_features * w.in_features for w in weights)


@torch.inference_mode()
def log_probabilities(decoder: Decoder, ids: list[int], kv: str) -> torch.Tensor:
    """float32 [tokens, V]: of what follows each token, from one pass over pages."""
    dtype = decoder.final_norm.weight.dtype if kv == "auto" else torch.float8_e4m3fn
    pages = -(-len(ids) // PAGE)
    shape = KvCache.shape(decoder.spec, pages, PAGE)
    scales: list[KvScale] = KvScales(kv == "fp8_per_token_head").make(shape, dtype, CPU)
    cache = KvCache(zeros(shape, dtype, CPU), scales)
    rope = RopeTable(decoder.spec.ropes, len(ids), decoder.final_norm.weight)
    places = torch.arange(len(ids))
    rows = make_attention_rows([len(ids)], [len(ids)], [list(range(pages))], PAGE)
    x = decoder(torch.tensor(ids), rope.at(places), places, rows, cache, None)
    return decoder.logits(x).float().log_softmax(-1)


def measure(source: str, variant: Variant, ids: list[int], exact: torch.Tensor | None) -> tuple[Figures, torch.Tensor]:
    """`exact`: the exact mode's log probabilities; None: this is the one."""
    decoder, bits = load(source, variant)
    found = log_probabilities(decoder, ids, variant.kv)
    reference = found if exact is None else exact
    surprise = -found[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean()
    kl = (reference.exp() * (reference - found)).sum(-1).mean()
    return Figures(math.exp(float(surprise)), float(kl), bits), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="as model.source")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=1024, help="the most that are read of the text")
    parser.add_argument("--only", nargs="*", help="names of variants, besides the exact one")
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    ids = (
        tokenizers.load(Model(source=arguments.model))
        .tokenizer.encode(arguments.text.read_text())
        .ids[: arguments.tokens]
    )
    print(f"{len(ids)} tokens of {arguments.text.name}", flush=True)
    exact: torch.Tensor | None = None
    results: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        if exact is not None and arguments.only and variant.name not in arguments.only:
            continue
        figures, found = measure(arguments.model, variant, ids, exact)
        exact = found if exact is None else exact
        results[variant.name] = figures._asdict()
        print(f"| {variant.name} | {figures.bits:.2f} | {figures.perplexity:.3f} | {figures.kl:.4f} |", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
