"""The meaning against complex numbers: a pair is one, and a rotation multiplies it."""

import torch

from services.worker.kernels.ops.latent_write import latent_write


def test_rows_of_the_pages_and_queries() -> None:
    for case in latent_write.cases:
        q, kv, cos, sin, norm, pages, slots, interleaved = case.make(torch.float32)
        before_q, before = q.clone(), pages.clone()
        latent_write.meaning(q, kv, cos, sin, norm, pages, slots, interleaved)
        rotated, latent = cos.shape[-1], len(norm.weight)
        half = rotated // 2
        turn = torch.complex(cos[..., :half], sin[..., half:])

        def turned(x: torch.Tensor, turn: torch.Tensor = turn, by_turns: bool = interleaved) -> torch.Tensor:
            half = x.shape[-1] // 2
            real, imaginary = (x[..., ::2], x[..., 1::2]) if by_turns else (x[..., :half], x[..., half:])
            result = torch.complex(real, imaginary) * turn
            return torch.cat((result.real, result.imag), -1)

        plain = q.shape[2] - rotated
        assert torch.equal(q[..., :plain], before_q[..., :plain])
        torch.testing.assert_close(q[..., plain:], turned(before_q[..., plain:]))
        wanted = before.to(torch.float32, copy=True).view(-1, before.shape[2])
        mean = kv[:, :latent].square().mean(-1, keepdim=True)
        wanted[slots, :latent] = kv[:, :latent] / (mean + norm.eps).sqrt() * norm.weight
        wanted[slots, latent : latent + rotated] = turned(kv[:, None, latent:])[:, 0]
        if narrow := pages.element_size() == 1:
            limit = torch.finfo(pages.dtype).max
            assert (wanted.abs() > limit).any()
            wanted = wanted.clamp(-limit, limit).to(pages.dtype).float()
        rtol, atol = (0.13, 2e-3) if narrow else (1.3e-6, 1e-5)  # to the next of 8 bits
        torch.testing.assert_close(pages.float(), wanted.view_as(pages), rtol=rtol, atol=atol)
