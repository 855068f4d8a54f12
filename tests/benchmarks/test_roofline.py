"""Floors beside numbers that were counted by hand, and beside what the models' files say of their weights."""

import math

import pytest

from benchmarks.gpus import FP8, QUANTIZED
from benchmarks.models import SHAPES, config_of
from benchmarks.peers import PEERS
from benchmarks.published import MIMO_CUT, PUBLISHED, QWEN3_NEXT_CUT
from benchmarks.roofline import (
    attention_flops,
    decode_floor_ms,
    index_elements,
    kv_elements,
    layers_elements,
    mlp_elements,
    offline_floor_s,
    prefill_floor_s,
    read_bytes,
)
from benchmarks.shapes import (
    DEEPSEEK_V3_4,
    DEEPSEEK_V32_4,
    GPT_OSS_20B,
    LLAMA_8B,
    MODELS,
    QWEN3_30B_A3B,
    QWEN3_600M,
)
from services.worker.loader import expected_shapes
from services.worker.models.registry import find_model as find_declaration
from services.worker.models.spec import Config

NEXT, MIMO = QWEN3_NEXT_CUT.shape, MIMO_CUT.shape
ALL = {**SHAPES, **{name: published.shape for name, published in PUBLISHED.items()}}


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: str(shape.name))
def test_floors_lie_below_the_peer_and_near_the_published_ones(shape: object) -> None:
    model = next(model for model in MODELS if model is shape)
    peer = PEERS[model.name]
    assert decode_floor_ms(model, 1, 640) == pytest.approx(peer.floor_ms, rel=0.1)
    for count, rate in peer.offline.items():
        assert count * 256 / offline_floor_s(model, count, 512, count * 256) > rate
    assert 64 * 2048 / prefill_floor_s(model, 2048, 64) > peer.prefill


def test_more_tokens_read_more_experts_up_to_all() -> None:
    (kind,) = QWEN3_30B_A3B.kinds
    few, some, many = (mlp_elements(QWEN3_30B_A3B, kind, tokens) for tokens in (1, 16, 10_000))
    assert few < some < many == pytest.approx(QWEN3_30B_A3B.layer_weights - kind.attention)
    assert sum(layers_elements(QWEN3_600M, 1)) == 28 * QWEN3_600M.layer_weights


def test_narrow_weights_lower_the_floor_by_what_they_save() -> None:
    bf16 = decode_floor_ms(LLAMA_8B, 1, 640)
    shares = {name: decode_floor_ms(LLAMA_8B, 1, 640, form) / bf16 for name, form in QUANTIZED.items()}
    assert shares["fp8"] == shares["int8"] == pytest.approx(0.54, abs=0.02), "the head stays in bf16"
    assert shares["mxfp4"] == pytest.approx(0.32, abs=0.02) and shares["int4"] < shares["mxfp4"]
    assert offline_floor_s(LLAMA_8B, 1, 512, 256, QUANTIZED["int4"]) < offline_floor_s(LLAMA_8B, 1, 512, 256)


@pytest.mark.parametrize("name", ALL)
def test_all_that_a_floor_reads_is_what_the_checkpoint_has(name: str) -> None:
    """A step of so many tokens that it takes all experts. Floors leave out norms and biases."""
    shape = ALL[name]
    config = PUBLISHED[name].config if name in PUBLISHED else config_of(shape)
    _, model = find_declaration(config["architectures"])
    sizes = expected_shapes(model.read(Config(config)), model.names)
    matrices = sum(math.prod(size) for key, size in sizes.items() if len(size) > 1 and not key.endswith("bias"))
    tables = shape.hidden * shape.vocab * (1 if shape.tie else 2)
    assert sum(layers_elements(shape, 10**9)) + index_elements(shape, 10**9) + tables == matrices


def test_an_indexer_makes_long_contexts_cheap_and_short_ones_hardly_dearer() -> None:
    for length in (100, 2048):
        assert attention_flops(DEEPSEEK_V32_4, length) == attention_flops(DEEPSEEK_V3_4, length)
        key = 4 * 7168 * 128 * 2  # bytes of what makes the index keys, which later tokens may choose by
        assert read_bytes(DEEPSEEK_V32_4, 1, length) == read_bytes(DEEPSEEK_V3_4, 1, length) + key
    # a pair costs 64 heads of 128 instead of 128 of 192 and 128; what is chosen, 2,048 tokens, 1,088 a head
    chosen = 2 * 128 * 1088 * 2048 * (130_000 - 2048)
    rest = 4 * (chosen + 2 * 64 * 128 * (130_000 * 130_001 - 2048 * 2049) / 2)
    assert attention_flops(DEEPSEEK_V32_4, 130_000) == rest + attention_flops(DEEPSEEK_V32_4, 2048)
    # 130,000 keys of 128; queries of 64 heads by a latent of 1,536, and their weights of the hidden state
    more = read_bytes(DEEPSEEK_V32_4, 1, 130_000) - read_bytes(DEEPSEEK_V32_4, 1, 2048)
    assert more == 4 * 2 * (128 * 130_000 + 1536 * 8192 + 7168 * 64)
    assert read_bytes(DEEPSEEK_V3_4, 1, 130_000) - read_bytes(DEEPSEEK_V3_4, 1, 0) == 4 * 2 * 576 * 130_000


def test_a_prompt_reads_the_experts_that_it_chooses_once() -> None:
    """512 tokens choose nearly all 32 experts of gpt-oss, 24 layers of 1.6 GB; an 8B multiplies longer."""
    weights = sum(layers_elements(GPT_OSS_20B, 512)) + 2880 * 201_088
    assert prefill_floor_s(GPT_OSS_20B, 512, 1) == pytest.approx(2 * weights / 4.27e12)
    flops = 8192 * (2 * 32 * LLAMA_8B.layer_weights + 32 * 2 * 32 * 256 * 8193 / 2) + 2 * 4096 * 128_256
    assert prefill_floor_s(LLAMA_8B, 8192, 1) == pytest.approx(flops / 796e12)


def test_windows_of_gpt_oss_by_hand() -> None:
    """12 layers see all, 12 the last 128 tokens; 8 heads of 64 for keys, and for values."""
    assert kv_elements(GPT_OSS_20B, 640) == 12 * 1024 * (640 + 128)
    assert kv_elements(GPT_OSS_20B, 130_000) == 12 * 1024 * (130_000 + 128)
    for length in (100, 640, 130_000):
        all_pairs = length * (length + 1) // 2
        windows = sum(min(token, 128) for token in range(1, length + 1))
        assert attention_flops(GPT_OSS_20B, length) == 12 * 2 * 64 * 128 * (all_pairs + windows)
    # a layer: attention 2880 x (4096 + 1024) and 4096 x 2880, 4 of 32 experts of 3 x 2880 x 2880, the router
    layer = 2880 * 5120 + 4096 * 2880 + 4 * 3 * 2880 * 2880 + 2880 * 32
    assert read_bytes(GPT_OSS_20B, 1, 0) == 2 * (24 * layer + 2880 * 201_088)


def test_gated_deltanet_by_hand() -> None:
    """Qwen3-Next: 18 layers with states of 32 x 128 x 128 in fp32 and 3 inputs of 8,192 channels, 6 that attend."""
    delta = 2048 * (12_288 + 64) + 4 * 8192 + 4096 * 2048
    full = 2048 * (8192 + 1024) + 4096 * 2048
    mlp = (10 + 1) * 3 * 2048 * 512 + 2048 * 512
    weights = 2 * (18 * delta + 6 * full + 24 * mlp + 2048 * 151_936)
    state = 18 * 2 * (2_097_152 + 49_152)
    assert read_bytes(NEXT, 1, 0) == weights + state + 24 * 2048 * 2  # the shared expert's gate is a vector
    assert read_bytes(NEXT, 1, 640) - read_bytes(NEXT, 1, 0) == 6 * 2 * 2 * 256 * 640 * 2
    assert read_bytes(NEXT, 3, 640, FP8) - read_bytes(NEXT, 3, 0, FP8) == 3 * 6 * 2 * 2 * 256 * 640
    assert attention_flops(NEXT, 100) == 6 * 2 * 16 * 512 * 5050 + 18 * 2 * 3 * 32 * 128 * 128 * 100
    assert decode_floor_ms(NEXT, 1, 640) == pytest.approx(0.93, abs=0.01)


def test_values_smaller_than_keys_by_hand() -> None:
    """MiMo-V2-Flash's 8 layers: 0 and 5 see all with 4 heads, 6 see 129 tokens with 8; 320 numbers a head."""
    assert kv_elements(MIMO, 640) == 320 * (2 * 4 * 640 + 6 * 8 * 129)
    assert kv_elements(MIMO, 100) == 320 * (2 * 4 * 100 + 6 * 8 * 100)
    assert kv_elements(MIMO, 130_000) == 320 * (2 * 4 * 130_000 + 6 * 8 * 129)
    full, window = 4096 * (12_288 + 4 * 320) + 8192 * 4096, 4096 * (12_288 + 8 * 320) + 8192 * 4096
    mlp = 3 * 4096 * 16_384 + 7 * (8 * 3 * 4096 * 2048 + 4096 * 256)
    assert read_bytes(MIMO, 1, 0) == 2 * (2 * full + 6 * window + mlp + 4096 * 152_576)
    windows = sum(min(token, 129) for token in range(1, 1001))
    assert attention_flops(MIMO, 1000) == 2 * 64 * 320 * (2 * 500_500 + 6 * windows)
    assert decode_floor_ms(MIMO, 1, 640) == pytest.approx(1.40, abs=0.01)
