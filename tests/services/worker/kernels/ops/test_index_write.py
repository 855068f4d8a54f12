"""The meaning against torch's layer norm and complex numbers: a pair is one, and a rotation multiplies it."""

import torch

from services.worker.kernels.ops.index_write import index_write


def test_rows_of_the_pages_and_queries() -> None:
    for case in index_write.cases:
        q, k, cos, sin, norm, pages, slots, interleaved = case.make(torch.float32)
        before_q, wanted = q.clone(), pages.to(torch.float32, copy=True)
        index_write.meaning(q, k, cos, sin, norm, pages, slots, interleaved)
        rotated = cos.shape[-1]
        half = rotated // 2
        turn = torch.complex(cos[..., :half], sin[..., half:])

        def turned(x: torch.Tensor, turn: torch.Tensor = turn, by_turns: bool = interleaved) -> torch.Tensor:
            first, rest = x[..., : 2 * turn.shape[-1]], x[..., 2 * turn.shape[-1] :]
            low, high = first.chunk(2, -1)
            pair = torch.complex(first[..., ::2], first[..., 1::2]) if by_turns else torch.complex(low, high)
            return torch.cat(((pair * turn).real, (pair * turn).imag, rest), -1)

        torch.testing.assert_close(q, turned(before_q))
        normed = torch.nn.functional.layer_norm(k, k.shape[1:], norm.weight, norm.bias, 1e-6)
        wanted.view(-1, wanted.shape[2])[slots, -k.shape[1] :] = turned(normed[:, None])[:, 0]
        if narrow := pages.element_size() == 1:
            limit = torch.finfo(pages.dtype).max
            assert (wanted.abs() > limit).any()
            wanted = wanted.clamp(-limit, limit).to(pages.dtype).float()
        rtol, atol = (0.13, 2e-3) if narrow else (1.3e-6, 1e-5)  # to the next of 8 bits
        torch.testing.assert_close(pages.float(), wanted, rtol=rtol, atol=atol)
