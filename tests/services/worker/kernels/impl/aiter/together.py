"""`python -m tests.services.worker.kernels.impl.aiter.together MEETING`: two ranks on a fake AITER.

Prints as JSON, by rank, what test_all_reduce_add_norm.py holds against one process without AITER: by architecture
the tokens, and what of AITER's sums was called for them.
"""

import json
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from services.worker.binding import with_right_sums
from services.worker.compile import INDUCTOR, compile_pieces
from services.worker.division import Division
from services.worker.group import Group, Place
from services.worker.kernels.impl.aiter import _all_reduce
from services.worker.kernels.ops.rms_norm import normalized
from services.worker.kernels.registry import Bindings, Facts, bind, find_impls
from services.worker.layers.decoder import Decoder, build_decoder
from services.worker.loader import expected_shapes, load_parameters
from services.worker.models.registry import find_model
from services.worker.models.spec import Config
from services.worker.quant.registry import choose_policy
from services.worker.random_weights import draw_all
from services.worker.shares import Rank, local_spec
from tests.services.worker.forked import said_by
from tests.services.worker.kernels.impl.aiter.custom import give_custom
from tests.services.worker.kernels.impl.aiter.fake import NEW, install
from tests.services.worker.kernels.impl.aiter.models import BLOCK_TOKENS, COMMON, CONFIGS, generate, serve

CPU, ARCH, RANKS = torch.device("cpu"), "gfx950", 2
ARCHITECTURES = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM")
GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24}
GROUPED |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True}
PROMPTS = [list(range(3, 3 + length)) for length in (40, 1, 17, 33)]
CALLS: "Counter[str]" = Counter()


class Custom:
    """AITER's object over the process group of the tests. Takes what the real one takes, at any width."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        assert dist.get_backend(group) == "gloo" and device == CPU
        self._group = group

    def custom_all_reduce(self, input: Tensor) -> Tensor:  # noqa: A002 AITER's name
        assert input.is_contiguous()
        CALLS["sum"] += 1
        return self._sum(input)

    def custom_fused_ar_rms(
        self,
        input: Tensor,  # noqa: A002
        residual_inp: Tensor,
        weight: Tensor,
        eps: float,
        use_1stage: bool,
    ) -> tuple[Tensor, Tensor]:
        assert use_1stage and input.is_contiguous() and residual_inp.is_contiguous() and weight.is_contiguous()
        assert input.shape == residual_inp.shape and len(input) <= 80 and weight.shape == input.shape[1:]
        CALLS["norm"] += 1
        total = self._sum(input) + residual_inp
        return normalized(total, weight, eps), total

    def _sum(self, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=self._group)
        return total


def model_of(architecture: str, bindings: Bindings, rank: Rank | None = None) -> Decoder:
    """Of random weights, or one rank's share of them."""
    config = COMMON | (GROUPED if architecture.startswith("Glm") else CONFIGS[architecture])
    _, model = find_model([architecture])
    spec = model.read(Config(config | {"architectures": [architecture]}))
    tensors = draw_all(expected_shapes(spec, model.names), CPU)
    division = None if rank is None else Division(spec, model.names, rank, bindings)
    parameters = load_parameters(tensors, model, spec, choose_policy("float32", CPU, bindings), division=division)
    return build_decoder(spec if rank is None else local_spec(spec, rank), model, parameters, bindings)


def bound(architecture: str, group: Group, opaque: bool) -> Bindings:
    """As a rank on such GPUs binds, and tries the sums."""
    config = COMMON | CONFIGS.get(architecture, {})
    shapes = {name: config[name] for name in ("head_dim", "hidden_size")} | {"block_tokens": BLOCK_TOKENS}
    shapes |= {"num_heads": config["num_attention_heads"] // 2, "num_kv_heads": config["num_key_value_heads"] // 2}
    facts = Facts("cuda", ARCH, torch.bfloat16, shapes)
    bindings = bind(("aiter", "torch"), facts, finder=find_impls, opaque=opaque)
    given: Any = None  # of the configuration: only a wrong sum's next binding reads it
    return with_right_sums(given, facts, int(opaque), bindings, (), group)


def said_of(architecture: str, group: Group, compiled: bool = False) -> dict[str, Any]:
    bindings = bound(architecture, group, compiled)
    model = model_of(architecture, bindings, group.rank)
    if compiled:
        model.pieces = compile_pieces(INDUCTOR, model, "aot_eager")
    CALLS.clear()
    tokens = generate(serve(model, bindings), PROMPTS, 6, chunk=16)
    return {"tokens": tokens, "calls": dict(CALLS)}


def be_rank(rank: int) -> dict[str, Any]:
    group = Group(Place(rank, RANKS, sys.argv[1]), CPU)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, NEW, ARCH, exact=True)
        give_custom(patch, Custom)
        patch.setattr(_all_reduce, "own_device", lambda: CPU)
        said = {architecture: said_of(architecture, group) for architecture in ARCHITECTURES}
        said["compiled"] = said_of(ARCHITECTURES[0], group, compiled=True)
    group.meet()
    group.leave()
    return said


if __name__ == "__main__":
    torch.compile(torch.neg, backend="aot_eager")(torch.ones(2))  # what a compiler imports, for both ranks
    print(json.dumps(said_by(RANKS, be_rank)))
