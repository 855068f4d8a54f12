from triton import knobs

from services.worker.kernels.impl.triton import _builds


def test_compiled_and_found_kernels_are_counted() -> None:
    before, listener = dict(_builds.COUNTS), knobs.compilation.listener
    try:
        _builds.watch()
        assert knobs.compilation.listener is not None
        for cache_hit in (False, True, True):
            knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)
    finally:
        knobs.compilation.listener = listener
    assert _builds.COUNTS["compiled"] - before["compiled"] == 1
    assert _builds.COUNTS["found"] - before["found"] == 2
