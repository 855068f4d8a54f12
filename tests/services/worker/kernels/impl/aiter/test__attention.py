"""Which kernel takes what: the limits of each, one by one."""

import torch

from services.worker.kernels.impl.aiter._attention import Pages, takes_assembly, takes_gluon, takes_prefill
from services.worker.kernels.layout import shuffled
from services.worker.kernels.ops.kv_write import KvScale
from services.worker.kernels.ops.paged_attention import AttentionSpec
from tests.services.worker.kernels.impl.aiter.fake import NEW, OLD, Fake

BF16 = torch.bfloat16
SPEC = AttentionSpec(128**-0.5)


def pages(head_dim: int = 128, block_tokens: int = 16, dtype: torch.dtype = BF16, by_token: bool = False) -> Pages:
    given = torch.zeros(2, 3, block_tokens, 2, head_dim).to(dtype)
    return Pages(given[0], given[1]) if by_token else Pages(*shuffled(given[0], given[1]))


def queries(num_heads: int = 8, head_dim: int = 128, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(1, num_heads, head_dim, dtype=dtype)


def test_pages_know_their_shape() -> None:
    for by_token in (False, True):
        found = pages(64, 32, by_token=by_token)
        assert (found.head_dim, found.block_tokens, found.num_heads, found.shuffled) == (64, 32, 2, not by_token)


def test_assembly(fake: Fake) -> None:
    fake(NEW)
    assert takes_assembly(queries(), pages(), SPEC) and takes_assembly(queries(32), pages(), SPEC)
    half = torch.float16
    assert takes_assembly(queries(dtype=half), pages(dtype=half), SPEC)
    assert not takes_assembly(queries(34), pages(), SPEC), "17 query heads of a KV head"
    assert not takes_assembly(queries(head_dim=64), pages(64), SPEC)
    assert not takes_assembly(queries(), pages(block_tokens=32), SPEC)
    assert not takes_assembly(queries(), pages(by_token=True), SPEC)
    assert not takes_assembly(queries(), pages(dtype=torch.float8_e4m3fn), SPEC)
    for change in ({"scale": 0.1}, {"window": 5}, {"softcap": 1.0}, {"sinks": torch.zeros(8)}):
        assert not takes_assembly(queries(), pages(), SPEC._replace(**change))


def test_gluon(fake: Fake) -> None:
    fake(NEW)
    spec = SPEC._replace(scale=0.3, kv_scale=KvScale(torch.ones(1), torch.ones(1)))
    assert takes_gluon(queries(), pages(dtype=torch.float8_e4m3fn), spec)
    assert takes_gluon(queries(head_dim=64), pages(64, 64), SPEC)
    assert not takes_gluon(queries(130), pages(), SPEC) and not takes_gluon(queries(), pages(block_tokens=32), SPEC)
    assert not takes_gluon(queries(), pages(), SPEC._replace(window=4))
    assert not takes_gluon(queries(), pages(by_token=True), SPEC)
    fake(OLD)
    assert not takes_gluon(queries(), pages(), SPEC)


def test_prefill(fake: Fake) -> None:
    fake(NEW)
    for by_token in (False, True):
        assert takes_prefill(queries(), pages(by_token=by_token), SPEC._replace(window=3, softcap=2.0))
    assert not takes_prefill(queries(head_dim=64), pages(64), SPEC)
    assert not takes_prefill(queries(), pages(block_tokens=64), SPEC)
    assert not takes_prefill(queries(), pages(dtype=torch.float8_e4m3fn), SPEC)
    fake(OLD)
    assert not takes_prefill(queries(), pages(), SPEC), "its pages hold one token"
