from common.logprobs import Report, record_bytes


def test_a_record_has_a_rank_and_two_numbers_per_token() -> None:
    assert [record_bytes(top) for top in (-1, 0, 20)] == [0, 12, 172]


def test_who_asks_for_any() -> None:
    assert not Report().asks
    assert Report(0).asks and Report(-1, 0).asks
