"""A gated DeltaNet layer against its formula, rows of unlike kinds in one step. Families: models/test_registry.py."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import torch
from torch.nn import functional

from services.worker.kernels.ops.causal_conv import Spread, make_state_rows
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


def make_layer(spec: DeltaSpec, randn: Callable[..., torch.Tensor]) -> DeltaNet:
    generator = torch.Generator().manual_seed(5)
    parts = DeltaParts(randn(40, 3), torch.rand(4, generator=generator), randn(4), Norm(torch.rand(6) + 0.5, 1e-6))
    project = Linear(DenseWeight(randn(72, 8), BINDINGS), None, BINDINGS)
    return DeltaNet(spec, project, Linear(DenseWeight(randn(8, 24), BINDINGS), None, BINDINGS), parts, BINDINGS)


def test_drafts_leave_no_trace_but_those_that_hold() -> None:
    """Rows of which each step verifies some drafts, and some hold: every token is what it is when all are sure."""
    generator = torch.Generator().manual_seed(4)
    random = Random(6)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    drafts = 3
    spec = replace(SPEC, drafts=drafts)
    layer = make_layer(spec, randn)
    kept = tuple(torch.full((4, *each.shape), 9.0) for each in spec.cache.tensors)
    rows = {block: randn(40, 72) for block in (2, 0, 3)}
    wanted = {block: alone(layer, projected) for block, projected in rows.items()}
    done, held, turn = dict.fromkeys(rows, 0), dict.fromkeys(rows, 0), (torch.zeros(0), torch.zeros(0))
    seen = set()
    while min(done.values()) < 40:
        tried, counts, given, true = [], [], [], []
        for block, projected in rows.items():
            at = done[block]
            fills = block == 3 and 0 < at < 7  # a row that has not come to its end yet, beside rows with drafts
            tried.append(0 if fills or at >= 36 else random.randint(0, drafts) if at else 0)
            counts.append(min(2, 40 - at) if fills else int(at < 40))
            true.append(random.randint(0, tried[-1]))
            tokens = projected[at : at + counts[-1] + tried[-1]].clone()
            tokens[counts[-1] + true[-1] :] += 1  # drafts that will not hold
            given.append(tokens)
        active = [i for i, count in enumerate(counts) if count]
        blocks = [list(rows)[i] for i in active]
        spread = Spread([tried[i] for i in active], [held[block] for block in blocks])
        step = make_state_rows([counts[i] for i in active], [done[block] for block in blocks], blocks, spread)
        attended = layer.attend(torch.cat([given[i] for i in active]), turn, kept, *step)
        for i, part in zip(active, attended.split([len(given[i]) for i in active]), strict=True):
            block, sure = list(rows)[i], counts[i] + true[i]
            expected = wanted[block][done[block] : done[block] + sure]
            torch.testing.assert_close(part[:sure], expected, rtol=1e-4, atol=1e-5)
            done[block] += sure
            seen.add((held[block], tried[i], true[i]))
            held[block] = true[i]
    assert {(3, 3, 0), (0, 3, 3)} <= seen and all((h, 0, 0) in seen for h in range(3)), "every kind of step came"


def test_rows_that_begin_go_on_and_wait_are_each_the_formula() -> None:
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layer = make_layer(SPEC, randn)
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
