"""Files of users: whose they are, how long they live, and what a crash leaves."""

import os
import time
from pathlib import Path

import pytest

from services.api.batches.database import Database
from services.api.batches.files import ABANDONED_S, Files
from services.api.batches.records import File


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(Database(tmp_path), tmp_path)


def keep(files: Files, owner: str = "me", text: bytes = b"abc") -> File:
    path = files.arriving()
    path.write_bytes(text)
    file = files.place(path, owner, "../../name", "batch")
    files.add(file)
    return file


def test_everybody_has_his_own(files: Files) -> None:
    mine, other = keep(files), keep(files, "other", b"defgh")
    assert files.of("me") == [mine] and files.find(other.id, "me") is None and not files.delete(other.id, "me")
    assert files.path(mine.id).read_bytes() == b"abc" and files.path(other.id).read_bytes() == b"defgh"
    assert (mine.bytes, files.total_bytes()) == (3, 8)
    assert files.delete(mine.id, "me") and not files.path(mine.id).exists() and files.of("me") == []


def test_what_arrives_counts(files: Files) -> None:
    files.arriving().write_bytes(b"1234")
    assert files.total_bytes() == 4


def test_what_another_replica_moves_just_now_is_passed_over(files: Files) -> None:
    """It is listed, and gone when it is looked at: a link to nowhere is the same."""
    mine = keep(files)
    files.arriving().write_bytes(b"1234")
    for path in (files.arriving(), files.path("file-gone")):
        path.symlink_to("nowhere")
    assert files.total_bytes() == 7
    files.sweep()
    assert files.of("me") == [mine]


def test_what_expired_or_was_abandoned_is_swept(files: Files) -> None:
    kept, old = keep(files), keep(files)
    files.add(old._replace(id="file-x", expires=int(time.time())))
    os.replace(files.path(old.id), files.path("file-x"))
    half, lost = files.arriving(), files.path("file-lost")
    for path in (half, lost):
        path.write_bytes(b"x")
    files.sweep()
    assert [file.id for file in files.of("me")] == [kept.id, old.id] and not files.path("file-x").exists()
    assert half.exists() and lost.exists(), "somebody may be at it"
    long_ago = time.time() - ABANDONED_S - 1
    for path in (half, lost, files.path(kept.id)):
        os.utime(path, (long_ago, long_ago))
    files.sweep()
    assert not half.exists() and not lost.exists() and files.path(kept.id).exists()
