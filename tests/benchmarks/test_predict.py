"""The tables of docs/rocm.md are those that the code makes, and the code's arithmetic is that of a sheet of paper."""

from pathlib import Path

import pytest

from benchmarks import gpus, predict
from benchmarks.gpus import AMD, BF16, FP8, MI300X, MI355X, MXFP4, MXFP4_EXPERTS, Format, Machine
from benchmarks.peers import ATOM, PUBLISHED_CONTEXT
from benchmarks.roofline import decode_floor_ms, kv_elements, products_s, read_bytes
from benchmarks.shapes import GPT_OSS_120B, LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B, ModelShape

ROOT = Path(__file__).resolve().parents[2]
SMALL = ModelShape("small", layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, inner=16, vocab=32)
# One layer: q 8x8, k and v 8x4 each, o 8x8 = 192; MLP 3x8x16 = 384. Head 8x32 = 256. KV 8 elements a token and layer.


def test_bytes_of_a_small_model_by_hand() -> None:
    assert read_bytes(SMALL, 1, 10, BF16) == 2 * (192 + 384) * 2 + 256 * 2 + 10 * 2 * 8 * 2
    mixed = Format("mixed", attention_bytes=2, mlp_bytes=0.5, kv_bytes=1)
    assert read_bytes(SMALL, 3, 10, mixed) == 2 * (192 * 2 + 384 * 0.5) + 256 * 2 + 3 * 10 * 2 * 8


def test_products_of_a_small_model_by_hand() -> None:
    machine = Machine("m", "", 1, 1.0, {"bf16": 10.0, "fp8": 40.0})
    assert products_s(SMALL, 3, BF16, machine) == pytest.approx(2 * 3 * (2 * (192 + 384) + 256) / 10)
    assert products_s(SMALL, 3, FP8, machine) == pytest.approx(2 * 3 * (2 * (192 + 384) / 40 + 256 / 10))
    in_bf16 = products_s(SMALL, 3, BF16, machine)
    assert products_s(SMALL, 3, MXFP4, machine) == pytest.approx(in_bf16)  # a machine without products in fp4


def test_the_slower_of_reading_and_multiplying_counts() -> None:
    reads = Machine("reads", "", 1, 1e3, {"bf16": 1e12})
    assert decode_floor_ms(SMALL, 1, 10, BF16, reads) == pytest.approx(read_bytes(SMALL, 1, 10))
    assert decode_floor_ms(SMALL, 1, 10, BF16, reads, 0.5) == pytest.approx(2 * read_bytes(SMALL, 1, 10))
    multiplies = Machine("multiplies", "", 1, 1e12, {"bf16": 1e3})
    assert decode_floor_ms(SMALL, 1, 10, BF16, multiplies, 0.5) == pytest.approx(2 * (2 * 576 + 256))


def test_every_second_layer_of_a_windowed_model_reads_the_window() -> None:
    windowed = SMALL._replace(window=4)
    assert kv_elements(windowed, 10) == (10 + 4) * 8
    assert kv_elements(windowed, 3) == (3 + 3) * 8
    assert kv_elements(SMALL, 10) == 20 * 8


def test_known_sizes() -> None:
    """As commonly said: 8.0 and 70.6 thousand million weights, 5.1 of gpt-oss active, 38 GB of the 70B in MXFP4."""
    assert read_bytes(LLAMA_8B, 1, 0) / 2 + LLAMA_8B.hidden * LLAMA_8B.vocab == pytest.approx(8.03e9, rel=0.01)
    assert read_bytes(LLAMA_70B, 1, 0) / 2 + LLAMA_70B.hidden * LLAMA_70B.vocab == pytest.approx(70.6e9, rel=0.01)
    assert read_bytes(LLAMA_70B, 1, 0, MXFP4) == pytest.approx(38.5e9, rel=0.02)
    assert read_bytes(GPT_OSS_120B, 1, 0) / 2 == pytest.approx(5.13e9, rel=0.02)
    assert read_bytes(GPT_OSS_120B, 10_000, 0, MXFP4_EXPERTS) == pytest.approx(63e9, rel=0.04)
    assert read_bytes(QWEN3_30B_A3B, 1, 0) / 2 == pytest.approx(3.0e9, rel=0.02)


def test_more_bandwidth_and_fewer_bits_are_faster() -> None:
    for rows in predict.BATCHES:
        for form in predict.FORMATS:
            figures = [decode_floor_ms(LLAMA_8B, rows, predict.CONTEXT, form, gpu) for gpu in AMD]
            assert figures == sorted(figures, reverse=True)
        bf16, fp8 = (decode_floor_ms(LLAMA_8B, rows, predict.CONTEXT, form, MI300X) for form in (BF16, FP8))
        assert fp8 < bf16


def test_nothing_published_is_below_its_floor() -> None:
    """A floor that somebody has beaten is wrong."""
    for published in ATOM:
        shape, form = predict.STORED[published.model]
        for rows, (rate, token_ms) in published.tokens_ms.items():
            floor_ms = decode_floor_ms(shape, rows, PUBLISHED_CONTEXT, form, MI355X)
            assert floor_ms < token_ms and rows * 1000 / floor_ms > rate


def test_amd_gpus_have_the_figures_of_their_data_sheets() -> None:
    assert [gpu.arch for gpu in AMD] == ["gfx942", "gfx942", "gfx950", "gfx950"]
    assert [round(gpu.bandwidth / 1e12, 1) for gpu in AMD] == [5.3, 6.0, 8.0, 8.0]
    ridges = [round(gpu.flops["bf16"] / gpu.bandwidth) for gpu in AMD]
    assert ridges == [247, 218, 288, 315]
    assert 0.5 < gpus.REACHED < 1


def test_the_document_has_the_tables_of_today() -> None:
    document = (ROOT / "docs/rocm.md").read_text()
    assert predict.renewed(document) == document, "python -m benchmarks.predict --write docs/rocm.md"
    assert predict.text() in document
