import torch

from services.worker.kernels.ops.rope_kv_write import HeadNorm, make_rope_kv_case, rope_kv_write

OWN_VALUES = (
    make_rope_kv_case(7, 8, 4, (48, 32), 16, False),
    make_rope_kv_case(3, 4, 2, (24, 20), 24, True),
)


def turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: tuple[torch.Tensor, float] | None
) -> list[float]:
    """One head [D], by the formula, in float64."""
    x, cos, sin = x.double(), cos.double().flatten(), sin.double().flatten()
    if norm is not None:
        x = x / (x.square().mean() + norm[1]).sqrt() * norm[0].double()
    out, half = x.tolist(), len(cos) // 2
    for i in range(half):
        angle = torch.complex(cos[i], sin[half + i])
        pair = complex(torch.complex(x[i], x[half + i]) * angle)
        out[i], out[half + i] = pair.real, pair.imag
    return out


def test_equals_formula() -> None:
    for dtype, tolerance in rope_kv_write.tolerances.items():
        for case in (*rope_kv_write.cases, *OWN_VALUES):
            qkv, cos, sin, k_cache, v_cache, slots, norm, kv_scale = case.make(dtype)
            before, head_dim, size = (k_cache.clone(), v_cache.clone()), k_cache.shape[-1], k_cache.shape[1]
            q = rope_kv_write.meaning(qkv, cos, sin, k_cache, v_cache, slots, norm, kv_scale)
            heads, kv_heads = q.shape[1], k_cache.shape[2]
            assert q.dtype == dtype and q.shape == (len(qkv), heads, head_dim)
            widths = heads * head_dim, kv_heads * head_dim, kv_heads * v_cache.shape[3]
            parts = [
                part.view(len(qkv), count, part.shape[1] // count)
                for part, count in zip(qkv.split(widths, 1), (heads, kv_heads, kv_heads), strict=True)
            ]
            near = {"rtol": tolerance.relative, "atol": tolerance.absolute}
            for token, slot in list(enumerate(slots.tolist()))[:40]:
                place, angle = (slot // size, slot % size), (cos[token], sin[token])
                wanted = [turned(x, *angle, norm and (norm.q, norm.eps)) for x in parts[0][token]]
                torch.testing.assert_close(q[token].double(), torch.tensor(wanted, dtype=torch.float64), **near)
                wanted = [turned(x, *angle, norm and (norm.k, norm.eps)) for x in parts[1][token]]
                expected = torch.tensor(wanted, dtype=torch.float64)
                if kv_scale is None:
                    torch.testing.assert_close(k_cache[place].double(), expected, **near)
                    assert torch.equal(v_cache[place], parts[2][token]), case.name
                    continue
                # half a unit of 3 bits behind the point, or of the smallest numbers
                k, v = k_cache[place].double() * kv_scale.k, v_cache[place].double() * kv_scale.v
                torch.testing.assert_close(k, expected, rtol=0.07 + near["rtol"], atol=2**-10 + near["atol"])
                torch.testing.assert_close(v, parts[2][token].double(), rtol=0.07, atol=2**-10)
            for now, then in zip((k_cache, v_cache), before, strict=True):
                others = torch.ones(len(now) * size, dtype=torch.bool)
                others[slots] = False
                assert torch.equal(now.float().flatten(0, 1)[others], then.float().flatten(0, 1)[others]), case.name


def test_queries_and_keys_have_norm_weights_of_their_own() -> None:
    qkv, cos, sin, k_cache, v_cache, slots, _, _ = rope_kv_write.cases[1].make(torch.float32)
    norm = HeadNorm(torch.ones(128), torch.full((128,), 2.0), 0.0)
    q = rope_kv_write.meaning(qkv, cos, sin, k_cache, v_cache, slots, norm, None)
    torch.testing.assert_close(q.square().mean(-1), torch.ones(5, 16))
    torch.testing.assert_close(k_cache.flatten(0, 1)[slots].square().mean(-1), torch.full((5, 8), 4.0))
