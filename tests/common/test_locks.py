import fcntl
from pathlib import Path

from common.locks import try_lock


def test_one_excludes_others_until_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with open(path) as second:
        with open(path) as first:
            assert try_lock(first.fileno()) and try_lock(first.fileno())
            assert not try_lock(second.fileno()) and not try_lock(second.fileno(), fcntl.LOCK_SH)
        assert try_lock(second.fileno())


def test_those_who_share_exclude_only_one_who_does_not(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with open(path) as first, open(path) as second:
        assert try_lock(first.fileno(), fcntl.LOCK_SH) and try_lock(second.fileno(), fcntl.LOCK_SH)
        assert not try_lock(first.fileno())
