"""Floors of a step on the development GPU: every byte read once at full bandwidth, every product at full rate. Pure."""

from benchmarks.peers import BANDWIDTH, FLOPS
from benchmarks.shapes import ModelShape

WIDTH = 2  # bytes of bf16


def layer_elements(shape: ModelShape, tokens: int) -> float:
    """Elements of a layer's matrices that a step of `tokens` reads: of the experts those that tokens choose.

    Experts are taken as chosen independently and evenly, which random weights come near to.
    """
    if not shape.experts:
        return float(shape.layer_weights)
    expert = 3 * shape.hidden * shape.inner
    chosen = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
    return shape.layer_weights - expert * (shape.experts - chosen)


def token_elements(shape: ModelShape) -> float:
    """Elements of matrices that one token is multiplied with, the head apart."""
    return shape.layers * layer_elements(shape, 1)


def decode_floor_ms(shape: ModelShape, rows: int, context: float) -> float:
    """A step of `rows` sequences with `context` tokens each."""
    head = shape.hidden * shape.vocab
    weights = shape.layers * layer_elements(shape, rows) + head
    kv = rows * context * shape.layers * shape.kv_elements
    products = 2 * rows * (token_elements(shape) + head)
    return 1000 * max((weights + kv) * WIDTH / BANDWIDTH, products / FLOPS)


def prefill_floor_s(shape: ModelShape, length: int, count: int) -> float:
    """The products of `count` prompts, with those of causal attention; the head only for the last tokens."""
    attention = 2 * 2 * shape.q_width * (length + 1) / 2 * shape.layers
    per_prompt = length * (2 * token_elements(shape) + attention) + 2 * shape.hidden * shape.vocab
    return count * per_prompt / FLOPS


def offline_floor_s(shape: ModelShape, count: int, prompt: int, output_tokens: int) -> float:
    """Prefill, then decode at the mean context."""
    output = output_tokens / count
    return prefill_floor_s(shape, prompt, count) + output * decode_floor_ms(shape, count, prompt + output / 2) / 1000
