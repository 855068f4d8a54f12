from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from services.worker.kernels.registry import Facts, bind
from services.worker.quant.contract import WeightFormat
from services.worker.quant.int4 import Int4Format
from services.worker.quant.registry import DTYPES, INT4_LIMIT_ROWS, WeightPolicy, choose_policy


@pytest.mark.parametrize("dtype", DTYPES)
def test_named_dtype_is_dense_everywhere(dtype: str, make_stored: Callable[..., Any]) -> None:
    policy = choose_policy(dtype)
    assert policy.activation == DTYPES[dtype]
    for use in ("linear", "embedding", "tied"):
        weight = policy.make([make_stored("Q4_1", 16, 64)], use)
        assert weight.format_name == "none"
        assert weight.embed(torch.tensor([0])).dtype == DTYPES[dtype]
        assert weight.linear(torch.zeros(1, 64, dtype=DTYPES[dtype])).dtype == DTYPES[dtype]


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match='"int3", supported: auto, float32'):
        choose_policy("int3")


def test_gpu_default_is_bf16() -> None:
    policy = choose_policy("auto", torch.device("cuda", 0))
    assert (policy.activation, policy.device.type) == (torch.bfloat16, "cuda")


def test_auto_keeps_four_bits_for_few_rows(make_stored: Callable[..., Any]) -> None:
    policy = choose_policy("auto")
    assert policy.activation == torch.float32
    part = make_stored("Q4_1", 64, 128)
    weight = policy.make([part])
    assert weight.format_name.startswith("int4+")
    assert weight.linear(torch.zeros(INT4_LIMIT_ROWS, 128)).shape == (INT4_LIMIT_ROWS, 64)
    expected = part.dense(torch.float32)
    assert (weight.dequantize() - expected).norm() < 4e-3 * expected.norm()


def test_auto_for_other_storage_and_uses(make_stored: Callable[..., Any]) -> None:
    policy = choose_policy("auto")
    assert "int4" not in policy.make([make_stored("F32", 16, 64)]).format_name
    tied = policy.make([make_stored("Q8_0", 64, 64)], "tied")
    table = policy.make([make_stored("Q8_0", 64, 64)], "embedding")
    assert table.format_name == "none"
    assert tied.num_bytes > table.num_bytes == 64 * 64 * 2
    assert tied.embed(torch.tensor([5])).dtype == torch.float32


def test_auto_without_vector_units_is_exact(monkeypatch: pytest.MonkeyPatch, make_stored: Callable[..., Any]) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    policy = choose_policy("auto")
    assert [weight_format.name for weight_format in policy.linear] == ["none"]
    part = make_stored("Q4_1", 16, 64)
    assert torch.equal(policy.make([part]).dequantize(), part.dense(torch.float32))


def test_no_format_is_an_error_with_reasons(make_stored: Callable[..., Any]) -> None:
    only: tuple[WeightFormat, ...] = (Int4Format(),)
    policy = WeightPolicy(torch.float32, torch.device("cpu"), only, choose_policy("float32").table)
    with pytest.raises(ConfigError, match=r"Q8_0\.weight of memory \(int4: .*not in four bits\)"):
        policy.make([make_stored("Q8_0", 16, 64)])


def test_auto_takes_the_compiled_product_where_a_provider_has_it(make_stored: Callable[..., Any]) -> None:
    policy = choose_policy("auto", bindings=bind(("numba", "torch"), Facts("cpu")))
    for storage, name in (("Q4_1", "grouped4+"), ("Q8_0", "grouped8+")):
        part = make_stored(storage, 64, 64)
        weight = policy.make([part])
        assert weight.format_name.startswith(name)
        x = torch.randn(3, 64)
        torch.testing.assert_close(weight.linear(x), x @ part.dense(torch.float32).T, rtol=1e-4, atol=1e-4)
