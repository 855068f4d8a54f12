import pytest

from benchmarks.gpus import QUANTIZED
from benchmarks.peers import PEERS
from benchmarks.roofline import attention_flops, decode_floor_ms, layer_elements, offline_floor_s, prefill_floor_s
from benchmarks.shapes import DEEPSEEK_V3_4, DEEPSEEK_V32_4, LLAMA_8B, MODELS, QWEN3_30B_A3B, QWEN3_600M


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: str(shape.name))
def test_floors_lie_below_the_peer_and_near_the_published_ones(shape: object) -> None:
    model = next(model for model in MODELS if model is shape)
    peer = PEERS[model.name]
    assert decode_floor_ms(model, 1, 640) == pytest.approx(peer.floor_ms, rel=0.1)
    for count, rate in peer.offline.items():
        assert count * 256 / offline_floor_s(model, count, 512, count * 256) > rate
    assert 64 * 2048 / prefill_floor_s(model, 2048, 64) > peer.prefill


def test_more_tokens_read_more_experts_up_to_all() -> None:
    few, many = layer_elements(QWEN3_30B_A3B, 1), layer_elements(QWEN3_30B_A3B, 10_000)
    assert few < layer_elements(QWEN3_30B_A3B, 16) < many == pytest.approx(QWEN3_30B_A3B.layer_weights)
    assert layer_elements(QWEN3_600M, 1) == QWEN3_600M.layer_weights


def test_narrow_weights_lower_the_floor_by_what_they_save() -> None:
    bf16 = decode_floor_ms(LLAMA_8B, 1, 640)
    shares = {name: decode_floor_ms(LLAMA_8B, 1, 640, form) / bf16 for name, form in QUANTIZED.items()}
    assert shares["fp8"] == shares["int8"] == pytest.approx(0.54, abs=0.02), "the head stays in bf16"
    assert shares["mxfp4"] == pytest.approx(0.32, abs=0.02) and shares["int4"] < shares["mxfp4"]
    assert offline_floor_s(LLAMA_8B, 1, 512, 256, QUANTIZED["int4"]) < offline_floor_s(LLAMA_8B, 1, 512, 256)


def test_an_indexer_makes_long_contexts_cheap_and_short_ones_no_dearer() -> None:
    for length in (100, 2048):
        assert attention_flops(DEEPSEEK_V32_4, length) == attention_flops(DEEPSEEK_V3_4, length)
        assert decode_floor_ms(DEEPSEEK_V32_4, 1, length) == decode_floor_ms(DEEPSEEK_V3_4, 1, length)
    # a pair costs 64 heads of 128 instead of 128 of 192 and 128; what is chosen, 2,048 tokens, 1,088 a head
    chosen = 2 * 128 * 1088 * 2048 * (130_000 - 2048)
    rest = 4 * (chosen + 2 * 64 * 128 * (130_000 * 130_001 - 2048 * 2049) / 2)
    assert attention_flops(DEEPSEEK_V32_4, 130_000) == rest + attention_flops(DEEPSEEK_V32_4, 2048)
    more = decode_floor_ms(DEEPSEEK_V32_4, 1, 130_000) - decode_floor_ms(DEEPSEEK_V32_4, 1, 2048)
    assert more == pytest.approx(1000 * 4 * 2 * 128 * 130_000 / 4.3e12, rel=0.15), "index keys only"
