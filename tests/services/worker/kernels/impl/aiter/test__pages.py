"""Which layout a host gets, what is refused, and the bound of 8 bits."""

import pytest
import torch

from services.worker.kernels.impl.aiter import rope_kv_write
from services.worker.kernels.impl.aiter._pages import bounds, layout_of, refuses_reading, refuses_writing, write
from services.worker.kernels.layout import SHUFFLED, TOKENS
from services.worker.kernels.ops.kv_write import KvScale, kv_write
from services.worker.kernels.registry import Facts
from tests.services.worker.kernels.impl.aiter.fake import NEW, OLD, Fake, fp8_of


def facts(arch: str = "gfx950", dtype: torch.dtype = torch.bfloat16, **shapes: int) -> Facts:
    return Facts("cuda", arch, dtype, {"head_dim": 128, "block_tokens": 16, "num_heads": 32} | shapes)


def test_the_layout_is_the_hosts(fake: Fake) -> None:
    fake(NEW)
    assert layout_of(facts()) == layout_of(facts(kv_fp8=1)) == layout_of(facts(head_dim=96)) == SHUFFLED
    assert layout_of(Facts("cuda", "gfx942", torch.float16)) == SHUFFLED, "a listing knows no shapes"
    fake(OLD)
    assert layout_of(facts()) == TOKENS and refuses_reading(facts()) is None and refuses_writing(facts()) is None


def test_refusals(fake: Fake) -> None:
    fake(NEW)
    assert refuses_writing(facts()) is None
    assert refuses_writing(facts(head_dim=20)) == "attends with heads of multiples of 16 from 32 to 256, not of 20"
    assert refuses_writing(facts(block_tokens=8)) == "reads pages of 16, 32, 64, 128 tokens, not of 8"
    assert refuses_writing(facts("sm_90")) == "needs gfx942 or gfx950"
    assert refuses_writing(facts(dtype=torch.float32)) == "does not do float32"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16])
def test_bounds_that_16_bits_round_up_still_fit(dtype: torch.dtype, activation: torch.dtype) -> None:
    pages = torch.zeros(1, dtype=torch.uint8).view(dtype)
    for scale in torch.rand(200, generator=torch.Generator().manual_seed(0)) + 0.01:
        low, high = bounds(scale[None], pages)
        clamped = torch.tensor([1e4, -1e4], dtype=activation).clamp(low, high)
        assert clamped.dtype == activation
        assert (clamped.float() / scale).to(dtype).float().abs().tolist() == [torch.finfo(dtype).max] * 2


def test_8_bits_saturate_though_aiters_do_not(fake: Fake) -> None:
    for release in (OLD, NEW):
        for arch in ("gfx942", "gfx950"):
            fake(release, arch)
            kv_scale = KvScale(torch.tensor([0.5]), torch.tensor([0.25]))
            k = torch.tensor([1e4, -1e4, 3.0, 130.0]).repeat(16).bfloat16().view(2, 2, 16)
            pages = torch.zeros(2, 2, 16, 2, 16, dtype=torch.uint8).view(fp8_of(arch))
            wanted = pages.clone()
            slots = torch.tensor([3, 17])
            kv_write.meaning(k, -k, wanted[0], wanted[1], slots, kv_scale)
            write(k, -k, pages[0], pages[1], slots, kv_scale)
            assert (
                torch.equal(pages.float(), wanted.float()) and pages.float().abs().max() == torch.finfo(pages.dtype).max
            )


@pytest.mark.parametrize("release", [OLD, NEW])
def test_without_the_compiled_part_pages_are_by_token(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    """Attention stays, which is Triton's; rotation and write in one too, where it can; writes alone are another's."""
    compiled = fake(release).modules["aiter"]
    for name in ("reshape_and_cache", "reshape_and_cache_flash"):
        monkeypatch.delattr(compiled, name, raising=False)
    assert layout_of(facts()) == TOKENS and refuses_reading(facts()) is None
    assert refuses_writing(facts()) == "this host has no aiter.reshape_and_cache_flash"
    assert rope_kv_write.refuses(facts()) is None
    for shapes in ({"kv_fp8": 1}, {"head_dim": 96}):
        assert rope_kv_write.refuses(facts(**shapes)) == "this host has no aiter.reshape_and_cache_flash"
