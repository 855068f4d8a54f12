from common.buckets import Buckets, cumulative, unpack


def test_values_fall_below_their_bounds() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        buckets.add(value)
    buckets.add(2.0, times=3)
    assert buckets.counts == [2, 4, 1] and buckets.total == 11.5


def test_packed_and_read_again() -> None:
    buckets = Buckets((1.0, 2.0))
    buckets.add(1.5, times=2)
    assert unpack(buckets.pack(), 4) == [0.0, 2.0, 0.0, 3.0]
    assert unpack(buckets.pack(), 5) == [0.0] * 5 and unpack(b"x", 2) == [0.0, 0.0]  # of another version


def test_fewer_bounds_may_be_shown() -> None:
    counts = [2.0, 4.0, 1.0, 8.0]
    assert cumulative((1.0, 2.0, 3.0), counts, (1.0, 3.0)) == [("1.0", 2.0), ("3.0", 7.0), ("+Inf", 15.0)]
