import torch

from services.worker.kernels.impl.aiter._mla import WIDER_ONCE, padded, padded_heads, paged, refuses_latent


def test_heads_are_padded_to_what_has_a_kernel() -> None:
    assert [padded_heads(heads, 1) for heads in (1, 8, 12, 16, 17, 32, 40, 64, 100, 128)] == [
        *(16, 16, 16, 16),
        *(32, 32, 64, 64, 128, 128),
    ]
    assert padded_heads(16, 4) == 16
    assert padded_heads(16, 2) == padded_heads(8, 3) == 32, "16 heads have kernels for one and for four tokens"
    assert padded_heads(129, 1) is None
    assert [padded_heads(heads, 1, WIDER_ONCE) for heads in (12, 16, 17, 64, 128)] == [16, 16, 128, 128, 128]
    assert padded_heads(16, 2, WIDER_ONCE) == 128


def test_padding_is_zero_and_behind() -> None:
    q = torch.randn(3, 5, 4)
    wide = padded(q, 16)
    assert wide.shape == (3, 16, 4) and torch.equal(wide[:, :5], q) and not wide[:, 5:].any() and wide.is_contiguous()


def test_the_cache_is_pages_of_one_token() -> None:
    cache = torch.randn(7, 576)
    assert paged(cache).shape == (7, 1, 1, 576) and paged(cache).data_ptr() == cache.data_ptr()


def test_only_the_published_latents() -> None:
    assert refuses_latent({}) is None and refuses_latent({"kv_lora_rank": 512, "qk_rope_head_dim": 64}) is None
    assert refuses_latent({"qk_rope_head_dim": 32}) == "latents of 512 and 64 numbers, not of 512 and 32"
