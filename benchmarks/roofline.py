"""Floors of a step: every byte read once at full bandwidth, every product at full rate. Pure.

By default those of the development GPU in bf16; `predict.py` asks for others.
"""

from benchmarks.gpus import BF16, H200, Format, Machine
from benchmarks.peers import FLOPS
from benchmarks.shapes import INDEX_DIM, INDEX_HEADS, LATENT, ROTATED, VALUE, ModelShape

HEAD_BYTES = 2  # the head stays in bf16 in every format


def attention_elements(shape: ModelShape) -> int:
    """Elements of a layer's projections around attention."""
    return shape.attention_weights


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


def kv_tokens(shape: ModelShape, context: float) -> float:
    """Tokens that one sequence's attention reads, summed over the layers."""
    if shape.chosen:  # and of all the others an indexer's key
        own = min(context, shape.chosen)
        index = INDEX_DIM / shape.kv_elements * context if context > shape.chosen else 0.0
        return shape.layers * (own + index)
    windowed = min(context, shape.window) if shape.window else context
    return shape.layers * context if not shape.window else (context + windowed) * shape.layers / 2


def read_bytes(shape: ModelShape, rows: int, context: float, form: Format = BF16) -> float:
    """What a decode step of `rows` sequences with `context` tokens each must read."""
    attention = attention_elements(shape)
    mlp = layer_elements(shape, rows) - attention
    weights = shape.layers * (attention * form.attention_bytes + mlp * form.mlp_bytes)
    kv = rows * kv_tokens(shape, context) * shape.kv_elements * form.kv_bytes
    return weights + shape.hidden * shape.vocab * HEAD_BYTES + kv


def products_s(shape: ModelShape, rows: int, form: Format, machine: Machine) -> float:
    """Time of the matrices' products of `rows` tokens at full rate."""
    attention = attention_elements(shape)
    mlp = layer_elements(shape, 1) - attention
    elements = {form.attention_type: 0.0, form.mlp_type: 0.0, "bf16": 0.0}
    elements[form.attention_type] += shape.layers * attention
    elements[form.mlp_type] += shape.layers * mlp
    elements["bf16"] += shape.hidden * shape.vocab
    bf16 = machine.flops["bf16"]
    return sum(2 * rows * count / machine.flops.get(kind, bf16) for kind, count in elements.items())


def decode_floor_ms(
    shape: ModelShape, rows: int, context: float, form: Format = BF16, machine: Machine = H200, reached: float = 1.0
) -> float:
    """A step of `rows` sequences with `context` tokens each, at the share `reached` of the bandwidth."""
    reading_s = read_bytes(shape, rows, context, form) / (machine.bandwidth * reached)
    return 1000 * max(reading_s, products_s(shape, rows, form, machine))


def attention_flops(shape: ModelShape, length: int) -> float:
    """Of a prompt's products of queries, keys and values, in the cheaper of latent attention's two forms."""
    pairs = length * (length + 1) / 2
    if not shape.query_rank:
        return 2 * 2 * shape.q_width * pairs * shape.layers
    most = min(length, shape.chosen) if shape.chosen else length
    expanded = 2 * shape.heads * (shape.head_dim + VALUE) * most * (most + 1) / 2  # while all is attended to
    chosen = 2 * shape.heads * (2 * LATENT + ROTATED) * most * (length - most)
    index = 2 * INDEX_HEADS * INDEX_DIM * (pairs - most * (most + 1) / 2)
    return shape.layers * (expanded + chosen + index)


def prefill_floor_s(shape: ModelShape, length: int, count: int) -> float:
    """The products of `count` prompts, with those of causal attention; the head only for the last tokens."""
    attention = attention_flops(shape, length) / length
    per_prompt = length * (2 * token_elements(shape) + attention) + 2 * shape.hidden * shape.vocab
    return count * per_prompt / FLOPS


def offline_floor_s(shape: ModelShape, count: int, prompt: int, output_tokens: int, form: Format = BF16) -> float:
    """Prefill, then decode at the mean context."""
    output = output_tokens / count
    step_ms = decode_floor_ms(shape, count, prompt + output / 2, form)
    return prefill_floor_s(shape, prompt, count) + output * step_ms / 1000
