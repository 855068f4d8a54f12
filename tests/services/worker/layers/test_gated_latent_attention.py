"""What the cache knows of a gated token, and how much smaller it is. The family: models/test_registry.py."""

from collections.abc import Callable
from typing import Any

import torch

from services.worker.layers.gated_latent_attention import EPS, EmbeddingGate
from services.worker.layers.kv_cache import KvCache


def test_a_token_is_normed_as_by_torch_from_what_the_cache_knows() -> None:
    generator = torch.Generator().manual_seed(1)
    embedding, up, kv_up, latents = (torch.randn(*s, generator=generator) for s in ((9, 5), (12, 5), (12, 4), (3, 4)))
    weight, bias = torch.randn(2, 12, generator=generator).unbind(0)
    gate, ids = EmbeddingGate(embedding, up, weight, bias), torch.tensor([7, 0, 7])
    known = gate.known(latents, kv_up, ids)
    assert known.dtype == torch.int32 and known[:, 0].tolist() == ids.tolist()
    product = (latents @ kv_up.T) * (embedding[ids] @ up.T)
    wanted = torch.nn.functional.layer_norm(product, (12,), weight, bias, EPS)
    torch.testing.assert_close(gate.normed(latents, kv_up, known, slice(None)), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gate.normed(latents, kv_up, known, slice(4, 8)), wanted[:, 4:8], rtol=1e-4, atol=1e-4)


def test_nothing_of_the_gate_is_in_the_cache_but_the_token(make_tiny: Callable[[str], Any]) -> None:
    """Rows of 24 numbers of a latent, 8 rotated, and 8 that name the token and its norm; a gate has 14."""
    spec = make_tiny("EgMlaForCausalLM").decoder.spec
    assert KvCache.shape(spec, 5, 16) == (3, 1, 5, 16, 1, 24 + 8 + 8)
    assert not make_tiny("EgMlaForCausalLM").decoder.compiles
