from common.seq_id import api_of, make_seq_id, tokenizer_of


def test_the_id_names_both_sides_and_counts() -> None:
    seq_id = make_seq_id(3, 7, 0x1ABCD, 5)
    assert (api_of(seq_id), tokenizer_of(seq_id)) == (3, 7)
    assert seq_id == 0x0307_ABCD_0000_0005 and seq_id + 1 == make_seq_id(3, 7, 0xABCD, 6)


def test_what_does_not_fit_is_cut_and_never_reaches_another_field() -> None:
    assert make_seq_id(0x1FF, 0, 0, 0) == 0xFF << 56
    assert make_seq_id(0, 0x100, 0, 1 << 32) == 0
