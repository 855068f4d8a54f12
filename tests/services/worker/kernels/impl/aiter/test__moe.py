from collections.abc import Sequence
from typing import Any

import pytest
import torch

from services.worker.kernels.impl.aiter._moe import shuffled
from services.worker.kernels.ops.moe_tiled import moe_tiled
from services.worker.kernels.packing.weight_tiles import tile_weight
from services.worker.quant.experts import TiledExperts
from tests.services.worker.kernels.impl.aiter.fake import NEW, OLD, Fake
from tests.services.worker.kernels.impl.aiter.models import CONFIGS, MOE, Drawn, generate, make_model, serve
from tests.services.worker.kernels.impl.aiter.test_models import PROMPTS, TORCH, bound


def test_tiles_are_marked_without_a_copy() -> None:
    tiles = tile_weight(torch.arange(2 * 32 * 64).view(2, 32, 64).to(torch.uint8))
    weight = shuffled(tiles)
    assert weight.is_shuffled and weight.shape == (2, 32, 64)  # type: ignore[attr-defined]
    assert weight.data_ptr() == tiles.data_ptr() and not hasattr(tiles, "is_shuffled")
    packed = shuffled(tiles, torch.float4_e2m1fn_x2)
    assert packed.is_shuffled and packed.dtype == torch.float4_e2m1fn_x2  # type: ignore[attr-defined]


@pytest.mark.parametrize("release", [OLD, NEW])
def test_a_mixtures_tokens_are_torchs(fake: Fake, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model on a fake AITER, its experts in tiles as quant/registry.py keeps them there."""
    dense = Drawn.experts

    def experts(drawn: Any, gate_up: Sequence[tuple[str, str]], down: Sequence[str], biases: None) -> Any:
        rows = dense(drawn, gate_up, down)
        if drawn._bindings.provider(moe_tiled) == "torch":
            return rows
        return TiledExperts(tile_weight(rows.gate_up), tile_weight(rows.down), drawn._bindings)

    monkeypatch.setattr(Drawn, "experts", experts)
    monkeypatch.setitem(CONFIGS, "Qwen3MoeForCausalLM", {**MOE, "moe_intermediate_size": 64})
    host = fake(release, exact=True)
    bindings = bound("Qwen3MoeForCausalLM")
    assert bindings.provider(moe_tiled) == "aiter"
    wanted = generate(serve(make_model("Qwen3MoeForCausalLM", TORCH), TORCH), PROMPTS, 8, chunk=16)
    assert "fused_moe" not in host.calls and len({tuple(tokens) for tokens in wanted}) > 1
    got = generate(serve(make_model("Qwen3MoeForCausalLM", bindings), bindings), PROMPTS, 8, chunk=16)
    assert got == wanted and "fused_moe" in host.calls
