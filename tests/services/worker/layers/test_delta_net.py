"""A gated DeltaNet layer against its formula, rows of unlike kinds in one step. Families: models/test_registry.py."""

import torch
from torch.nn import functional

from services.worker.kernels.ops.causal_conv import make_state_rows
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.delta_net import DeltaNet, DeltaParts
from services.worker.layers.linear import Linear
from services.worker.models.delta_spec import DeltaSpec
from services.worker.quant.contract import Norm
from services.worker.quant.none import DenseWeight

BINDINGS = bind(("torch",), Facts("cpu"))
SPEC = DeltaSpec((0,), heads=2, values=2, key_dim=4, value_dim=6, taps=3)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def alone(layer: DeltaNet, projected: torch.Tensor) -> torch.Tensor:
    """One whole row [n, ...], token by token. Returns [n, value heads * E]."""
    conv, decay, bias, norm = layer.parts
    heads, gates = projected[:, : 2 * SPEC.width].view(-1, 2, SPEC.width), projected[:, 2 * SPEC.width :].view(-1, 2, 4)
    mixed, z = heads[..., :20].flatten(1), heads[..., 20:].reshape(-1, 4, 6)
    mixed = torch.cat((torch.zeros(2, 40), mixed))
    out, state = [], torch.zeros(4, 4, 6)
    for t in range(len(projected)):
        qkv = functional.silu((mixed[t : t + 3] * conv.T).sum(0)).view(2, 20)
        for head in range(4):
            key_head, place = divmod(head, 2)
            q, k = unit(qkv[key_head, :4]) / 2, unit(qkv[key_head, 4:8])
            v = qkv[key_head, 8:].view(2, 6)[place]
            beta = gates[t, key_head, place].sigmoid()
            rate = functional.softplus(gates[t, key_head, 2 + place] + bias[head])
            held = state[head] * (-decay[head] * rate).exp()
            state[head] = held + torch.outer(k, beta * (v - k @ held))
            out.append(functional.rms_norm(q @ state[head], (6,), norm.weight, norm.eps) * functional.silu(z[t, head]))
    return torch.stack(out).view(len(projected), 24)


def test_rows_that_begin_go_on_and_wait_are_each_the_formula() -> None:
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    parts = DeltaParts(randn(40, 3), torch.rand(4, generator=generator), randn(4), Norm(torch.rand(6) + 0.5, 1e-6))
    project = Linear(DenseWeight(randn(72, 8), BINDINGS), None, BINDINGS)
    layer = DeltaNet(SPEC, project, Linear(DenseWeight(randn(8, 24), BINDINGS), None, BINDINGS), parts, BINDINGS)
    inputs, matrices = (torch.full((5, *each.shape), 9.0) for each in SPEC.cache.tensors)
    rows = {0: randn(9, 72), 1: randn(4, 72), 3: randn(1, 72)}
    wanted = {block: alone(layer, projected) for block, projected in rows.items()}
    # by step: the blocks whose rows take part, and how many tokens of each
    steps = [{1: 3, 0: 5}, {0: 1, 1: 1}, {3: 1, 0: 3}]
    done, got = dict.fromkeys(rows, 0), {block: [] for block in rows}  # type: ignore[var-annotated]
    turn = (torch.zeros(0), torch.zeros(0))
    for step in steps:
        slots, state_rows = make_state_rows(list(step.values()), [done[block] for block in step], list(step))
        projected = torch.cat([rows[block][done[block] : done[block] + count] for block, count in step.items()])
        attended = layer.attend(projected, turn, (inputs, matrices), slots, state_rows)
        for (block, count), part in zip(step.items(), attended.split(list(step.values())), strict=True):
            got[block].append(part)
            done[block] += count
    for block, expected in wanted.items():
        torch.testing.assert_close(torch.cat(got[block]), expected, rtol=1e-4, atol=1e-5)
    assert bool((inputs[[2, 4]] == 9).all() and (matrices[[2, 4]] == 9).all())
