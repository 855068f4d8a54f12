from services.worker.kernels.ops.silu_quantize_groups import silu_quantize_groups


def test_is_the_gate_in_fp8() -> None:
    for dtype in silu_quantize_groups.tolerances:
        for case in silu_quantize_groups.cases:
            x, stored, group, by_column = case.make(dtype)
            numbers, scales = silu_quantize_groups.meaning(x, stored, group, by_column)
            gate, up = x.double().chunk(2, -1)
            gated = gate / (1 + (-gate).exp()) * up
            by_token = (scales.T if by_column else scales).double()
            assert numbers.dtype == stored and by_token.shape == (len(x), gated.shape[1] // group)
            back = numbers.double() * by_token.repeat_interleave(group, -1)
            step = by_token.repeat_interleave(group, -1) * 2.0**-10 + gated.abs() * 0.08
            assert ((back - gated).abs() <= step).all()
