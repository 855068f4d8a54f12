"""Layouts of pages: there and back, and where each number lies."""

import pytest
import torch

from services.worker.kernels.layout import LAYOUTS, SHUFFLED, TOKENS, in_order, lanes, pages, shuffled, suits

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)


def numbered(dtype: torch.dtype, num_pages: int = 3, block_tokens: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages by token whose bytes tell them apart."""
    size = num_pages * block_tokens * 2 * 32
    stored = torch.arange(2 * size).to(torch.uint8 if dtype.itemsize == 1 else dtype)
    keys, values = stored.view(dtype).view(2, num_pages, block_tokens, 2, 32).unbind(0)
    return keys, values


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back(dtype: torch.dtype) -> None:
    keys, values = numbered(dtype)
    k_pages, v_pages = shuffled(keys, values)
    x = lanes(dtype)
    assert k_pages.shape == (3, 2, 32 // x, 16, x) and v_pages.shape == (3, 2, 16 // x, 32, x)
    for given, back in zip((keys, values), in_order(k_pages, v_pages), strict=True):
        assert torch.equal(given.view(torch.uint8), back.contiguous().view(torch.uint8))
    assert in_order(keys, values) == (keys, values)


def test_where_a_number_lies() -> None:
    keys, values = numbered(torch.bfloat16)
    k_pages, v_pages = shuffled(keys, values)
    page, token, head, dim = 2, 11, 1, 29
    assert k_pages[page, head, dim // 8, token, dim % 8] == keys[page, token, head, dim]
    assert v_pages[page, head, token // 8, dim, token % 8] == values[page, token, head, dim]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_is_the_same_run_of_memory_in_every_layout(layout: str, dtype: torch.dtype) -> None:
    keys, values = numbered(dtype)
    for given, page in zip((keys, values), pages(layout, keys, values), strict=True):
        assert page.data_ptr() == given.data_ptr() and page.is_contiguous()
        assert page[1].data_ptr() == given[1].data_ptr() and page[1].numel() == given[1].numel()


def test_what_can_be_shuffled() -> None:
    assert suits(SHUFFLED, 128, 16, torch.float8_e4m3fn) and suits(SHUFFLED, 72, 8, torch.bfloat16)
    assert not suits(SHUFFLED, 128, 8, torch.float8_e4m3fn) and not suits(SHUFFLED, 20, 16, torch.bfloat16)
    assert suits(TOKENS, 20, 3, torch.bfloat16)
    keys = torch.zeros(2, 3, 1, 20)
    with pytest.raises(AssertionError, match=r"pages of \(2, 3, 1, 20\) cannot be shuffled"):
        pages(SHUFFLED, keys, keys)
