"""The greedy token by AITER.

Of AITER's samplers only this one draws what our meaning draws: the others divide by noise of a generator's state, so a
request's tokens would depend on its batch and could not be replayed. Those ops are therefore not implemented here.
"""

import torch
from torch import Tensor

from services.worker.kernels.impl.aiter._host import HALF, Function, refusal
from services.worker.kernels.ops.argmax import argmax
from services.worker.kernels.registry import Facts, Impl

GREEDY = Function("aiter:greedy_sample", needs=("out", "input"))


def greedy(logits: Tensor) -> Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    if len(logits):
        GREEDY(out=tokens, input=logits.contiguous())
    return tokens


def refuses(facts: Facts) -> str | None:
    return refusal(facts, GREEDY, dtypes=(*HALF, torch.float32))


IMPL = Impl(argmax, "aiter", greedy, refuses)
