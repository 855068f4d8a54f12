"""What the interpreter makes of a reduction by a function of one's own, here as in Triton's slow way."""

import torch
import triton
import triton.language as tl


@triton.jit
def _later(value, place, other, other_place):  # type: ignore[no-untyped-def]
    """The larger value, and of equals the later place."""
    takes = (other > value) | ((other == value) & (other_place > place))
    return tl.where(takes, other, value), tl.where(takes, other_place, place)


@triton.jit
def _line(a, b):  # type: ignore[no-untyped-def]
    """Keeps the left one's tens and the right one's ones: the order counts."""
    return a // 10 * 10 + b % 10


@triton.jit
def _reduce(x_ptr, out_ptr, ROWS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    lane, row = tl.arange(0, SIZE), tl.arange(0, ROWS)
    x = tl.load(x_ptr + row[:, None] * SIZE + lane[None, :])
    place = tl.broadcast_to(lane[None, :], [ROWS, SIZE])
    value, best = tl.reduce((x, place), 1, _later)
    tl.store(out_ptr + row, value)
    tl.store(out_ptr + ROWS + row, best)
    kept = tl.reduce(x, 1, _line, keep_dims=True)
    tl.store(out_ptr + 2 * ROWS + row[:, None], kept)
    tl.store(out_ptr + 3 * ROWS, tl.reduce(x, None, _line))
    tl.store(out_ptr + 4 * ROWS + row[:, None] * SIZE + lane[None, :], tl.flip(x, 1))


def test_reductions_by_functions_of_ones_own(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    for rows, size in ((2, 1), (4, 2), (2, 16)):
        x = torch.randint(0, 90, (rows, size), generator=generator, dtype=torch.int32)
        out = torch.full((4 * rows + rows * size,), -1, dtype=torch.int32, device=device)
        _reduce[(1,)](x.to(device), out, rows, size)
        value, best, kept, rest, flipped = out.cpu().split([rows, rows, rows, rows, rows * size])
        wanted = [max((int(v), place) for place, v in enumerate(line)) for line in x]
        assert list(zip(value.tolist(), best.tolist(), strict=True)) == wanted
        line = x[:, 0] if size == 1 else x[:, 0] // 10 * 10 + x[:, -1] % 10
        assert torch.equal(kept, line)
        assert int(rest[0]) == int(x[0, 0]) // 10 * 10 + int(x[-1, -1]) % 10
        assert torch.equal(flipped.view(rows, size), x.flip(1))
