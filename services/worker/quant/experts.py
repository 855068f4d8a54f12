"""Experts kept dense: two stacks per layer, filled tensor by tensor, so that nothing is in memory twice.

As rows, or in tiles for a provider that reads those; the policy in quant/registry.py asks for tiles first where it is.
"""

from collections.abc import Sequence

import torch

from services.worker.kernels.ops.moe_clamped import moe_clamped
from services.worker.kernels.ops.moe_gated import moe_gated
from services.worker.kernels.ops.moe_tiled import moe_tiled
from services.worker.kernels.packing.weight_tiles import CHUNK_BYTES, ROWS, fits_tiles, tile_weight
from services.worker.kernels.registry import Bindings
from services.worker.quant.contract import ExpertBiases, ExpertWeights, StoredTensor


class DenseExperts:
    """`gate_up`: [E, 2I, N], gate rows first; `down`: [E, N, I]; both in the activations' dtype."""

    format_name = "none"

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, bindings: Bindings, biases: ExpertBiases | None = None
    ) -> None:
        self.gate_up, self.down, self.biases = gate_up, down, biases
        self.num_experts = len(gate_up)
        self.num_bytes = gate_up.nbytes + down.nbytes
        self._moe_gated, self._moe_clamped = bindings(moe_gated), bindings(moe_clamped)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> None:
        if self.biases is None:
            self._moe_gated(x, weights, experts, self.gate_up, self.down, residual)
        else:
            up, down = self.biases
            self._moe_clamped(x, weights, experts, self.gate_up, up, self.down, down, residual)


class DenseExpertFormat:
    name = "none"

    def __init__(self, dtype: torch.dtype, device: torch.device, bindings: Bindings) -> None:
        self._dtype, self._device, self._bindings = dtype, device, bindings

    def refuses(
        self,
        gate_up: Sequence[Sequence[StoredTensor]],
        down: Sequence[StoredTensor],
        biases: ExpertBiases | None = None,
    ) -> str | None:
        return None

    def make(
        self,
        gate_up: Sequence[Sequence[StoredTensor]],
        down: Sequence[StoredTensor],
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:
        hidden, inner = down[0].shape
        stacked_gate_up = torch.empty(len(down), 2 * inner, hidden, dtype=self._dtype, device=self._device)
        stacked_down = torch.empty(len(down), hidden, inner, dtype=self._dtype, device=self._device)
        for e, ((gate, up), out) in enumerate(zip(gate_up, down, strict=True)):
            stacked_gate_up[e, :inner] = gate.dense(self._dtype)
            stacked_gate_up[e, inner:] = up.dense(self._dtype)
            stacked_down[e] = out.dense(self._dtype)
        return DenseExperts(stacked_gate_up, stacked_down, self._bindings, biases)


class TiledExperts:
    """`gate_up`: tiles (kernels/packing/weight_tiles.py) of [E, 2I, N]; `down`: of [E, N, I]; activations' dtype."""

    format_name = "tiles"

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, bindings: Bindings) -> None:
        self.gate_up, self.down = gate_up, down
        self.num_experts = len(gate_up)
        self.num_bytes = gate_up.nbytes + down.nbytes
        self._moe_tiled = bindings(moe_tiled)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> None:
        self._moe_tiled(x, weights, experts, self.gate_up, self.down, residual)


class TiledExpertFormat:
    name = "tiles"

    def __init__(self, dtype: torch.dtype, device: torch.device, bindings: Bindings) -> None:
        self._dtype, self._device, self._bindings = dtype, device, bindings

    def refuses(
        self,
        gate_up: Sequence[Sequence[StoredTensor]],
        down: Sequence[StoredTensor],
        biases: ExpertBiases | None = None,
    ) -> str | None:
        if biases is not None:
            return "experts with biases"
        hidden, inner = down[0].shape
        if fits_tiles(hidden, inner) and fits_tiles(inner, hidden):
            return None
        return f"experts of {inner} by {hidden} do not divide into tiles"

    def make(
        self,
        gate_up: Sequence[Sequence[StoredTensor]],
        down: Sequence[StoredTensor],
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:
        hidden, inner = down[0].shape
        chunk = CHUNK_BYTES // self._dtype.itemsize
        up_tiles = torch.empty(
            (len(down), 2 * inner // ROWS, hidden // chunk, ROWS, chunk), dtype=self._dtype, device=self._device
        )
        down_tiles = torch.empty(
            (len(down), hidden // ROWS, inner // chunk, ROWS, chunk), dtype=self._dtype, device=self._device
        )
        for e, ((gate, up), out) in enumerate(zip(gate_up, down, strict=True)):
            up_tiles[e, : inner // ROWS] = tile_weight(gate.dense(self._dtype))
            up_tiles[e, inner // ROWS :] = tile_weight(up.dense(self._dtype))
            down_tiles[e] = tile_weight(out.dense(self._dtype))
        return TiledExperts(up_tiles, down_tiles, self._bindings)
