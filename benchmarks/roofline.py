"""Floors of a step: every byte read once at full bandwidth, every product at full rate. Pure.

By default those of the development GPU in bf16; `predict.py` asks for others.
"""

from benchmarks.gpus import BF16, H200, Format, Machine
from benchmarks.peers import BANDWIDTH, FLOPS
from benchmarks.shapes import INDEX_DIM, INDEX_HEADS, LATENT, ROTATED, LayerKind, ModelShape

HEAD_BYTES = 2  # the head stays in bf16 in every format


def mlp_elements(shape: ModelShape, kind: LayerKind, tokens: int) -> float:
    """Elements of a layer's MLP that a step of `tokens` reads: of the experts those that tokens choose.

    Experts are taken as chosen independently and evenly, which random weights come near to.
    """
    expert = 3 * shape.hidden * shape.inner
    if kind.dense or not shape.experts:
        return kind.dense or expert
    chosen = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
    return expert * (chosen + shape.shared) + shape.hidden * shape.experts


def layers_elements(shape: ModelShape, tokens: int) -> tuple[float, float]:
    """Elements that a step of `tokens` reads of all layers: around attention, and of MLPs."""
    attention = sum(kind.layers * kind.attention for kind in shape.kinds)
    return attention, sum(kind.layers * mlp_elements(shape, kind, tokens) for kind in shape.kinds)


def token_elements(shape: ModelShape) -> float:
    """Elements of matrices that one token is multiplied with, the head apart."""
    return sum(layers_elements(shape, 1))


def index_elements(shape: ModelShape, context: float) -> int:
    """Elements of all layers for the queries of an indexer and their weights, which a short context does not need."""
    if not shape.chosen or context <= shape.chosen:
        return 0
    return shape.layers * (shape.query_rank * INDEX_HEADS * INDEX_DIM + shape.hidden * INDEX_HEADS)


def kv_elements(shape: ModelShape, context: float) -> float:
    """Elements of keys and values that a token of one sequence reads, of all layers."""
    if shape.chosen:  # and of all the others an indexer's key
        index = INDEX_DIM * context if context > shape.chosen else 0.0
        return shape.layers * (min(context, shape.chosen) * shape.kv_elements + index)
    seen = [min(context, kind.window) if kind.window else context for kind in shape.kinds]
    return sum(kind.layers * kind.kv * tokens for kind, tokens in zip(shape.kinds, seen, strict=True))


def read_bytes(shape: ModelShape, rows: int, context: float, form: Format = BF16) -> float:
    """What a decode step of `rows` sequences with `context` tokens each must read, and write of their states."""
    attention, mlp = layers_elements(shape, rows)
    attention += index_elements(shape, context)
    states = sum(kind.layers * kind.state_bytes for kind in shape.kinds)
    own = rows * (kv_elements(shape, context) * form.kv_bytes + states)
    head = shape.hidden * shape.vocab * HEAD_BYTES
    return attention * form.attention_bytes + mlp * form.mlp_bytes + head + own


def products_s(shape: ModelShape, rows: int, form: Format, machine: Machine) -> float:
    """Time of the matrices' products of `rows` tokens at full rate."""
    attention, mlp = layers_elements(shape, 1)
    elements = {form.attention_type: 0.0, form.mlp_type: 0.0, "bf16": 0.0}
    elements[form.attention_type] += attention
    elements[form.mlp_type] += mlp
    elements["bf16"] += shape.hidden * shape.vocab
    bf16 = machine.flops["bf16"]
    return sum(2 * rows * count / machine.flops.get(kind, bf16) for kind, count in elements.items())


def decode_floor_ms(
    shape: ModelShape, rows: int, context: float, form: Format = BF16, machine: Machine = H200, reached: float = 1.0
) -> float:
    """A step of `rows` sequences with `context` tokens each, at the share `reached` of the bandwidth."""
    reading_s = read_bytes(shape, rows, context, form) / (machine.bandwidth * reached)
    return 1000 * max(reading_s, products_s(shape, rows, form, machine))


def pairs(length: int, window: int = 0) -> float:
    """Of each token of a prompt with itself and those before it that it sees."""
    most = min(length, window) if window else length
    return most * (most + 1) / 2 + most * (length - most)


def attention_flops(shape: ModelShape, length: int) -> float:
    """Of a prompt's products of queries, keys, values and states; of latents in the form that is cheaper there."""
    if not shape.chosen or length <= shape.chosen:
        return sum(
            2 * kind.layers * (kind.pair * pairs(length, kind.window) + kind.token * length) for kind in shape.kinds
        )
    expanded = 2 * shape.kinds[0].pair * pairs(shape.chosen)  # while all is attended to
    chosen = 2 * shape.heads * (2 * LATENT + ROTATED) * shape.chosen * (length - shape.chosen)
    index = 2 * INDEX_HEADS * INDEX_DIM * (pairs(length) - pairs(shape.chosen))
    return shape.layers * (expanded + chosen + index)


def prefill_floor_s(shape: ModelShape, length: int, count: int) -> float:
    """The products of `count` prompts, with those of causal attention, or matrices read once where that takes longer.

    The head only for the last tokens.
    """
    attention = attention_flops(shape, length) / length
    each = 2 * (token_elements(shape) + index_elements(shape, length)) + attention
    per_prompt = length * each + 2 * shape.hidden * shape.vocab
    weights = sum(layers_elements(shape, length * count)) + shape.hidden * shape.vocab
    return max(count * per_prompt / FLOPS, 2 * weights / BANDWIDTH)


def offline_floor_s(shape: ModelShape, count: int, prompt: int, output_tokens: int, form: Format = BF16) -> float:
    """Prefill, then decode at the mean context."""
    output = output_tokens / count
    step_ms = decode_floor_ms(shape, count, prompt + output / 2, form)
    return prefill_floor_s(shape, prompt, count) + output * step_ms / 1000
