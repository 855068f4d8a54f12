from typing import Any

import pytest

from services.worker.models.spec import Config, RopeSpec, read_decoder, read_moe, read_rope

BASE: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


def test_get_reads_by_type() -> None:
    config = Config({"a": 1, "b": None, "c": "x", "d": True})
    assert config.get(int, "a") == 1 and config.get(float, "a") == 1.0
    assert config.get(int, "b", 7) == 7 and config.get(str, "missing", "y") == "y"
    for kind, key in ((int, "missing"), (int, "b"), (int, "c"), (int, "d"), (float, "d"), (bool, "a")):
        with pytest.raises(ValueError, match=f"'{key}'"):
            config.get(kind, key)


def test_attention_parity_counts_operations() -> None:
    spec = read_decoder(Config(BASE))  # 4 heads of 3, as many for keys and values
    weights = 12 * (4 + 4 + 4 + 4) * 3 + 3 * 12 * 16
    assert spec.attention_parity == weights // (2 * 4 * 3)
    eight_b = BASE | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    }
    assert read_decoder(Config(eight_b | {"num_key_value_heads": 8})).attention_parity == 26_624
    moe = read_moe(Config({"num_experts_per_tok": 2}), 8, 10, True)
    assert read_decoder(Config(BASE), moe=moe).attention_parity == (576 + 3 * 12 * 20) // 24


def test_require_names_value_and_what_is_supported() -> None:
    config = Config({"hidden_act": "gelu", "nothing": None})
    config.require("hidden_act", ("gelu",))
    config.require("nothing", ())
    config.require("absent", ())
    with pytest.raises(ValueError, match=r"'hidden_act' is 'gelu', supported: 'silu'"):
        config.require("hidden_act", ("silu",))
    with pytest.raises(ValueError, match="supported: none"):
        config.require("hidden_act", ())


def test_read_decoder_defaults() -> None:
    spec = read_decoder(Config(BASE), qk_norm=True)
    assert (spec.num_kv_heads, spec.head_dim, spec.tie_embeddings, spec.qk_norm) == (4, 3, False, True)
    assert spec.rope == RopeSpec(10000.0, 3, "default", {}, 64)


def test_read_decoder_refuses_what_it_cannot_run() -> None:
    with pytest.raises(ValueError, match="4 query heads cannot share 3 KV heads"):
        read_decoder(Config(BASE | {"num_key_value_heads": 3}))
    with pytest.raises(ValueError, match="hidden_act"):
        read_decoder(Config(BASE | {"hidden_act": "gelu"}))
    with pytest.raises(ValueError, match="'vocab_size' is missing"):
        read_decoder(Config({key: value for key, value in BASE.items() if key != "vocab_size"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**12}, "num_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"max_position_embeddings": 2**60}, "max_position"),
        ({"partial_rotary_factor": 9.0}, "rope of 36"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor"),
    ],
)
def test_sizes_that_no_model_has(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_decoder(Config(BASE | {"head_dim": 4} | changes))


def test_mixtures_that_no_model_has() -> None:
    config = Config({"num_experts_per_tok": 1})
    for num_experts, inner in ((10**9, 8), (4, 0)):
        with pytest.raises(ValueError, match="experts"):
            read_moe(config, num_experts, inner, True)


def test_rope_of_both_generations_of_configs() -> None:
    old = read_rope(Config(BASE | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}), 8)
    new = read_rope(Config(BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}), 8)
    assert old == new == RopeSpec(5e5, 8, "linear", {"factor": 2.0}, 64)
    assert read_rope(Config(BASE | {"partial_rotary_factor": 0.5}), 8).rotary_dim == 4


def test_rope_refuses_unknown_kinds_and_missing_parameters() -> None:
    for scaling, text in (
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported; supported: default, linear"),
        ({"rope_type": "llama3", "factor": 2.0}, "'llama3' needs 'low_freq_factor'"),
        ({"rope_type": "linear", "factor": "two"}, "'factor' is 'two', expected a number"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": "x"}, "rope_theta is 'x'"),
    ):
        with pytest.raises(ValueError, match=text):
            read_rope(Config(BASE | {"rope_scaling": scaling}), 8)
