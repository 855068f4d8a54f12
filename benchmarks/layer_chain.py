"""Layers of a model as a step of some rows launches them, for `tune_layer`.

Layers have weights, keys and values of their own, as many layers as the model has or MOST_BYTES hold, so that all of it
comes from memory as in a step.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import layer_stages
from benchmarks.layer_stages import Flow, Stage, attention, experts, product
from benchmarks.narrow_work import weight_bytes
from benchmarks.shapes import ModelShape
from benchmarks.tuning import seconds
from services.worker.kernels.impl.triton.embedding import embedding_by_blocks

MOST_BYTES = 8 << 30  # of weights, keys and values
SPAN_S = 0.04  # of a measurement: a replay is milliseconds, and what precedes the first of some is to be little of them
CHECKED = 2  # layers whose results are compared: each makes a rounding larger


class Chain:
    """`rows` rows' way through layers of a model, with weights of `form`, "" for bf16."""

    def __init__(self, model: ModelShape, form: str, rows: int, device: torch.device, layers: int = 0) -> None:
        self.model, self.form, self.rows = model, form, rows
        self.layers = layers or min(model.layers, max(3, math.ceil(MOST_BYTES / self.stored_bytes)))
        self.flow = Flow(model, form, rows, device, self.layers)
        self.table = self.flow.random(max(4, rows), model.hidden)
        self.ids = torch.arange(rows, dtype=torch.int32, device=device)
        self.routing: list[tuple[Tensor, Tensor]] = []  # of the first result
        self.stages = tuple(self._stages())

    def _weight_bytes(self, elements: float) -> float:
        return weight_bytes(self.form.removesuffix("z"), elements) if self.form else 2 * elements

    @property
    def _kv_bytes(self) -> int:
        return 2 * self.rows * layer_stages.CONTEXT * self.model.kv_elements

    @property
    def stored_bytes(self) -> float:
        """Of a layer."""
        return self._weight_bytes(self.model.layer_weights) + self._kv_bytes

    @property
    def read_bytes(self) -> float:
        """Of a layer in a step, at least: weights of the experts that random routers reach, keys and values."""
        m = self.model
        elements = float(m.layer_weights)
        if m.experts:
            elements -= 3 * m.hidden * m.inner * m.experts * (1 - m.top_k / m.experts) ** self.rows
        return self._weight_bytes(elements) + self._kv_bytes

    def run(self, plans: tuple[Any, ...], layers: int = 0, without: int = -1) -> Tensor:
        """`without`: the number of a stage that is left out, which none relies on."""
        assert without < 0 or not self.stages[without].relied_on, self.stages[without].name
        self.flow.x = embedding_by_blocks(self.ids, self.table)
        for layer in range(layers or self.layers):
            for number, (stage, plan) in enumerate(zip(self.stages, plans, strict=True)):
                if number != without:
                    stage.launch(plan, layer)
        return self.flow.x

    def result(self, plans: tuple[Any, ...]) -> list[Tensor]:
        """What launches leave, each by itself, after some layers with the routing of the first call: a rounding
        otherwise changes a token's experts."""
        flow = self.flow
        flow.held = self.routing
        self.run(plans, min(self.layers, CHECKED))
        flow.held = None
        return [each.clone() for each in (flow.x, flow.qkv, flow.q, flow.attended, flow.filled())]

    def time(self, plans: tuple[Any, ...], without: int = -1) -> float:
        """Seconds of a layer."""
        return seconds([lambda: self.run(plans, without=without)], SPAN_S) / self.layers

    def _stages(self) -> Iterator[Stage]:
        m, flow = self.model, self.flow
        yield product(flow, "norm_linear", m.qkv_width, m.hidden, "x", "qkv")
        yield from attention(flow)
        yield product(flow, "add_linear", m.hidden, m.q_width, "attended", "x")
        if m.experts:
            yield from experts(flow)
            return
        yield product(flow, "norm_gated_linear", 2 * m.inner, m.hidden, "x", "gated")
        yield product(flow, "add_linear", m.hidden, m.inner, "gated", "x")
