import os
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.run_dir import check_run_dir, make_run_dir


def test_it_is_made_for_this_user_only_and_so_is_what_lies_above(tmp_path: Path) -> None:
    make_run_dir(tmp_path / "a" / "run")
    for folder in (tmp_path / "a", tmp_path / "a" / "run"):
        assert folder.stat().st_mode & 0o777 == 0o700
    make_run_dir(tmp_path / "a" / "run")


def test_one_that_others_can_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    make_run_dir(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_a_link_is_refused_also_to_a_folder_of_ours(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="symbolic link"):
        make_run_dir(tmp_path / "run")
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o755  # its mode was left alone
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="symbolic link"):
        make_run_dir(tmp_path / "dangling")
    assert not (tmp_path / "nothing").exists()


def test_a_folder_above_may_not_be_everybodys(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write to it"):
        make_run_dir(tmp_path / "open" / "run")
    (tmp_path / "open").chmod(0o1777)  # as /tmp: nobody can rename what is ours
    make_run_dir(tmp_path / "open" / "run")
    (tmp_path / "way").symlink_to(tmp_path / "open")
    make_run_dir(tmp_path / "way" / "run")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write to it"):
        make_run_dir(tmp_path / "way" / "run")


def test_one_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody was first under /tmp."""
    make_run_dir(tmp_path / "run")
    real, stolen = os.lstat, [tmp_path / "run"]

    def lstat(path: object, **options: object) -> os.stat_result:
        found = real(path, **options)  # type: ignore[call-overload]
        if Path(str(path)) not in stolen:
            return found
        return os.stat_result((*found[:4], 4321, *found[5:]))

    monkeypatch.setattr(os, "lstat", lstat)
    for look in (make_run_dir, check_run_dir):
        with pytest.raises(ConfigError, match="belongs to user 4321"):
            look(tmp_path / "run")
    stolen[0] = tmp_path
    for look in (make_run_dir, check_run_dir):
        with pytest.raises(ConfigError, match=r"lies in .* belongs to user 4321"):
            look(tmp_path / "run")


def test_what_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run directory"):
        make_run_dir(tmp_path / "file")
    with pytest.raises(ConfigError, match="run directory"):
        make_run_dir(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="too long"):
        make_run_dir(tmp_path / ("x" * 100))
    with pytest.raises(ConfigError, match="run directory"):
        check_run_dir(tmp_path / "nothing")
