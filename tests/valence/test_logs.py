from pathlib import Path

import pytest

from valence.errors import CommandError
from valence.logs import Logs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "api-0.log").write_text("12:00 INFO api-0 up\nTraceback\n")
    (tmp_path / "api-1.log").write_text("one\ntwo\n")
    (tmp_path / "worker-0.log").write_text("weights\n")
    return tmp_path


def test_lines_are_marked_unless_they_say_it_themselves(folder: Path) -> None:
    lines = list(Logs(folder).last(10))
    assert lines == ["12:00 INFO api-0 up", "api-0 | Traceback", "api-1 | one", "api-1 | two", "worker-0 | weights"]


def test_one_service_or_one_process(folder: Path) -> None:
    assert list(Logs(folder, "api").last(1)) == ["api-0 | Traceback", "api-1 | two"]
    assert list(Logs(folder, "api-1").last(1)) == ["api-1 | two"]
    with pytest.raises(CommandError, match="no log of 'gpu'; there are api-0, api-1, worker-0"):
        Logs(folder, "gpu")


def test_following_gives_whole_new_lines_also_after_rotation(folder: Path) -> None:
    logs = Logs(folder, "api")
    assert list(logs.new()) == []
    with (folder / "api-1.log").open("a") as file:
        file.write("three\nfo")
    assert list(logs.new()) == ["api-1 | three"]
    with (folder / "api-1.log").open("a") as file:
        file.write("ur\n")
    assert list(logs.new()) == ["api-1 | four"]
    (folder / "api-0.log").write_text("fresh\n")
    (folder / "api-2.log").write_text("new\n")
    assert list(logs.new()) == ["api-0 | fresh", "api-2 | new"]


def test_a_log_that_is_rotated_right_now_is_passed_over(folder: Path) -> None:
    """It is listed, and there is none of that name when it is opened: a link to nowhere is the same."""
    (folder / "api-2.log").symlink_to(folder / "not begun again")
    logs = Logs(folder, "api")
    assert list(logs.last(1)) == ["api-0 | Traceback", "api-1 | two"]
    (folder / "api-0.log").unlink()
    (folder / "api-0.log").symlink_to(folder / "not begun again")
    with (folder / "api-1.log").open("a") as file:
        file.write("three\n")
    assert list(logs.new()) == ["api-1 | three"]
