"""How probable given tokens are under a row's logits, and which tokens are the most probable ones."""

import torch
from torch import Tensor

from services.worker.kernels.registry import Case, Tolerance, op

ROWS = 32  # looked at together: what they take besides is some 30 bytes per logit


def make_logprobs_case(num_rows: int, vocab_size: int, top: int) -> Case:
    """Rounded, so that there are many equals."""

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
        generator = torch.Generator().manual_seed(num_rows + top)
        logits = (torch.randn(num_rows, vocab_size, generator=generator) * 4).round(decimals=1).to(dtype)
        tokens = torch.randint(0, vocab_size, (num_rows,), generator=generator, dtype=torch.int32)
        tokens[::2] = logits[::2].argmax(-1).to(torch.int32)
        return logits, tokens, top

    return Case(f"{num_rows}x{vocab_size}top{top}", make)


SUMS = "sums of exponentials in another order"


@op(
    cases=[
        make_logprobs_case(1, 9000, 5),
        make_logprobs_case(40, 300, 20),
        make_logprobs_case(3, 131, 0),
        make_logprobs_case(2, 4, 7),
        make_logprobs_case(0, 256, 2),
    ],
    tolerances={dtype: Tolerance(1e-5, 1e-5, SUMS) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
)
def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """log softmax(logits) of each row's token and of the `top` most probable ones, in float32.

    logits: float32 or the activations' dtype [S, V]; tokens: int32 [S]. Returns values float32 [S, 1 + top], the
    token's own first, then the best ones in their order; their ids int32 [S, 1 + top]; and ranks int32 [S] of the
    tokens, from 1 on. Equal logits are ordered by id. Where V < top, what is missing has id -1 and value -inf.
    """
    parts = [
        _of_rows(logits[at : at + ROWS], tokens[at : at + ROWS], top) for at in range(0, max(len(logits), 1), ROWS)
    ]
    values, ids, ranks = (torch.cat(column) for column in zip(*parts, strict=True))
    return values, ids, ranks


def _of_rows(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float() + 0.0  # no -0.0: it is another number of bits
    vocab_size = logits.shape[1]
    bits = logits.view(torch.int32)
    # One whole number per logit, greater for greater logits and, of equals, for smaller ids.
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    keys += torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    own = tokens.long()[:, None]
    best = vocab_size - 1 - (keys.topk(min(top, vocab_size), -1).values & 0xFFFFFFFF)
    ids = torch.cat((own, best), -1)
    values = logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
    ranks = (keys > keys.gather(1, own)).sum(-1, dtype=torch.int32) + 1
    missing = top - best.shape[1]
    if missing > 0:
        ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    return values, ids.to(torch.int32), ranks.to(torch.int32)
