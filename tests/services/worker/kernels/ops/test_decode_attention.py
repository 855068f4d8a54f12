import torch

from services.worker.kernels.ops.decode_attention import decode_attention, make_decode_case


def test_attends_to_what_it_writes_under_its_own_angle() -> None:
    """A row of one token sees nothing but its own value; the caches get the turned key and the value as it is."""
    qkv, (cos, sin), keys, values, slots, norm, rows, spec = make_decode_case("", [1], (2, 1, 8), 8, False).make(
        torch.float32
    )
    out = decode_attention.meaning(qkv, (cos, sin), keys, values, slots, norm, rows, spec)
    key, value = qkv[0, 16:24], qkv[0, 24:]
    torch.testing.assert_close(out, value.expand(1, 2, 8))
    turned = key * cos[0, 0] + key.roll(4) * sin[0, 0]
    torch.testing.assert_close(keys.view(-1, 8)[slots[0]], turned)
    assert torch.equal(values.view(-1, 8)[slots[0]], value)


def test_slots_are_the_last_tokens_of_the_rows() -> None:
    _, _, _, _, slots, _, rows, _ = make_decode_case("", [33, 16, 17], (2, 1, 8), 8, False).make(torch.float32)
    ends = rows.context_lens.long() - 1
    assert (slots % 16).tolist() == (ends % 16).tolist()
    assert (slots // 16).tolist() == [int(rows.tables[row, end // 16]) for row, end in enumerate(ends)]
