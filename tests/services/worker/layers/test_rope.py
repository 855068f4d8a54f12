from typing import Any

import pytest
import torch

from services.worker.layers.rope import RopeTable, frequencies
from services.worker.models.spec import RopeSpec

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}


def reference(kind: str, theta: float, parameters: dict[str, float]) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = LlamaConfig(
        head_dim=128,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": kind, "rope_theta": theta} | parameters,
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inverse, factor


@pytest.mark.parametrize(
    ("kind", "theta", "parameters"),
    [
        ("linear", 1e4, {"factor": 4.0}),
        ("llama3", 5e5, LLAMA3),
        ("llama3", 5e5, LLAMA3 | {"factor": 32.0}),
        ("yarn", 1e6, {"factor": 4.0, "original_max_position_embeddings": 32768}),
        ("yarn", 1e4, {"factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "mscale": 0.7}),
        ("yarn", 1e4, {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.5}),
        ("yarn", 1e4, {"factor": 8.0, "original_max_position_embeddings": 4096, "attention_factor": 1.3}),
    ],
)
def test_frequencies_equal_transformers(kind: str, theta: float, parameters: dict[str, float]) -> None:
    got, factor = frequencies(RopeSpec(theta, 128, kind, parameters, 32768))
    wanted, wanted_factor = reference(kind, theta, parameters)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
    assert factor == pytest.approx(wanted_factor)


def test_plain_frequencies_are_powers_of_theta() -> None:
    got, factor = frequencies(RopeSpec(10000.0, 8))
    torch.testing.assert_close(got, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert factor == 1.0


def test_llama3_keeps_short_waves_and_slows_long_ones() -> None:
    plain, _ = frequencies(RopeSpec(5e5, 128))
    scaled, _ = frequencies(RopeSpec(5e5, 128, "llama3", LLAMA3))
    assert torch.equal(scaled[:20], plain[:20])
    torch.testing.assert_close(scaled[-10:], plain[-10:] / 8)


def test_table_has_the_form_of_the_op() -> None:
    table = RopeTable([RopeSpec(10000.0, 8), RopeSpec(100.0, 8)], 16, torch.zeros(1))
    (cos, sin), (local, _) = table.at(torch.tensor([0, 3]))
    assert torch.equal(local[1, 0, :4], (3 * frequencies(RopeSpec(100.0, 8))[0]).cos())
    assert cos.shape == sin.shape == (2, 1, 8)
    assert cos[0].eq(1).all() and sin[0].eq(0).all()
    assert sin[1, 0, 0].item() == pytest.approx(-torch.tensor(3.0).sin().item())
    assert torch.equal(sin[1, 0, 4:], -sin[1, 0, :4])


def test_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        frequencies(RopeSpec(10000.0, 8, "dynamic", {"factor": 2.0}))
