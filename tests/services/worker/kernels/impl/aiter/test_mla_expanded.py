"""AITER's call for mla_expanded, on both releases and architectures."""

import pytest
import torch

from services.worker.kernels.ops.mla_expanded import make_expanded_case
from tests.services.worker.kernels.impl.aiter.calls import check_calls, host, impl_of, refusal_of
from tests.services.worker.kernels.impl.aiter.fake import NEW

DEEPSEEK = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
GLM = {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}


def test_is_the_meaning_where_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls("mla_expanded", monkeypatch)


def test_some_heads_of_a_step_are_attended_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the layer calls it where contexts are long: views of queries. And a step without chunks gives nothing."""
    impl = impl_of("mla_expanded")
    q, kv, *rest = make_expanded_case((7, 30), (100, 31), 4, (128, 64, 128)).make(torch.bfloat16)
    with host(monkeypatch, NEW, "gfx950"):
        part = impl.run(q[:, 1:3], kv[:, 1:3].contiguous(), *rest)
        assert part.shape == (37, 2, 128)
        torch.testing.assert_close(part, impl.op.meaning(q, kv, *rest)[:, 1:3], rtol=2e-2, atol=2e-2)
        assert impl.run(q[:0], kv, *rest).shape == (0, 4, 128)


def test_refuses_what_it_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of("mla_expanded", monkeypatch, DEEPSEEK) is refusal_of("mla_expanded", monkeypatch, GLM) is None
    assert refusal_of("mla_expanded", monkeypatch, {}, torch.float32) == "does not do float32"
    assert refusal_of("mla_expanded", monkeypatch, DEEPSEEK | {"v_head_dim": 96}) == (
        "has no kernels for keys of 192 numbers with values of 96"
    )
