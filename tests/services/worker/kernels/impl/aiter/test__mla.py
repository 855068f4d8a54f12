import torch

from services.worker.kernels.impl.aiter._mla import (
    WIDER_ONCE,
    padded,
    padded_heads,
    paged,
    refuses_latent,
    slot_lists,
)
from services.worker.kernels.ops.paged_attention import make_attention_rows


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


def test_pages_are_pages_of_one_token() -> None:
    pages = torch.randn(7, 4, 576)
    assert paged(pages).shape == (28, 1, 1, 576) and paged(pages).data_ptr() == pages.data_ptr()


def test_slots_lie_row_behind_row_and_are_made_once() -> None:
    rows = make_attention_rows([1, 2], [5, 3], [[4, 1], [2]], 4)
    starts, slots = slot_lists(rows)
    assert starts.tolist() == [0, 5, 8] and slots[:8].tolist() == [16, 17, 18, 19, 4, 8, 9, 10]
    assert slots.dtype == torch.int32 and len(slots) == 10, "room for the longest context in every row"
    assert slot_lists(rows)[1] is slots


def test_only_the_published_latents() -> None:
    assert refuses_latent({}) is None and refuses_latent({"kv_lora_rank": 512, "qk_rope_head_dim": 64}) is None
    assert refuses_latent({"qk_rope_head_dim": 32}) == "latents of 512 and 64 numbers, not of 512 and 32"
    assert refuses_latent({"latent_row": 704}) == "pages of 576 numbers a token, not of 704"
