import os
from pathlib import Path

import pytest

from common import curve
from common.curve import CLIENT, CLIENTS, SERVER, AllowList, Client, KeyPair
from common.errors import ConfigError

A, B = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    for name, content in (
        (SERVER, b'{"public": "%s", "secret": "%s"}' % (A.encode(), B.encode())),
        (CLIENT, b'{"public": "%s", "secret": "%s"}' % (B.encode(), A.encode())),
        (CLIENTS, curve.write_clients([Client("here", B)])),
    ):
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    return folder


def test_what_lies_there_is_read(folder: Path) -> None:
    keys = curve.read(folder)
    assert keys.server == KeyPair(A, B)
    assert keys.client.public_bytes == b"\xbb" * 32
    assert keys.client.secret_bytes == b"\xaa" * 32
    assert curve.read_clients(folder) == [Client("here", B)]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o777])
def test_a_secret_that_others_can_reach_is_refused(folder: Path, mode: int) -> None:
    (folder / SERVER).chmod(mode)
    with pytest.raises(ConfigError, match=r"others can read .*server\.key.*chmod 600"):
        curve.read(folder)


@pytest.mark.parametrize("mode", [0o400, 0o600])
def test_a_secret_of_its_owner_is_taken(folder: Path, mode: int) -> None:
    (folder / SERVER).chmod(mode)
    assert curve.read(folder).server.public == A


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_list_that_others_can_change_is_refused(folder: Path, mode: int) -> None:
    (folder / CLIENTS).chmod(mode)
    with pytest.raises(ConfigError, match="others can change"):
        curve.read_clients(folder)
    (folder / CLIENTS).chmod(0o644)
    assert curve.read_clients(folder)


def test_a_folder_that_others_can_change_is_refused(folder: Path) -> None:
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match=r"others can change .*keys"):
        curve.read(folder)
    folder.chmod(0o1777)  # as orchestrators mount secrets: nobody can replace another's file
    assert curve.read(folder).server.public == A


def test_files_of_another_user_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(folder).st_uid + 1)
    if os.stat(folder).st_uid == 0:  # root's may be read by a group, as a container gets them
        assert curve.read(folder).server.public == A
        (folder / SERVER).chmod(0o440)
        assert curve.read(folder).server.public == A
        (folder / SERVER).chmod(0o444)
    with pytest.raises(ConfigError):
        curve.read(folder)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff", b'{"public": "%s"}' % A.encode(), b"[" * 10**5, b"x" * (2 << 20)]
)
def test_no_key_file_is_told_without_being_quoted(folder: Path, content: bytes) -> None:
    (folder / CLIENT).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        curve.read(folder)
    assert len(str(refused.value)) < 300
    assert A not in str(refused.value)


def test_what_is_no_file_does_not_block(folder: Path) -> None:
    (folder / CLIENT).unlink()
    with pytest.raises(ConfigError, match="valence keys links init"):
        curve.read(folder)
    os.mkfifo(folder / CLIENT, 0o600)
    with pytest.raises(ConfigError, match="no file"):
        curve.read(folder)


def test_a_pair_shows_its_fingerprint_only() -> None:
    assert repr(KeyPair(A, B)) == f"KeyPair({curve.fingerprint(A)})"
    assert curve.fingerprint(A) != curve.fingerprint(B)


def test_the_list_follows_its_file_and_keeps_the_last_good_one(folder: Path) -> None:
    clients = AllowList(folder)
    assert (clients.find(b"\xbb" * 32), clients.find(b"\xaa" * 32)) == ("here", None)
    assert clients.follow() == ""
    (folder / CLIENTS).write_bytes(curve.write_clients([Client("there", A), Client("x", "c" * 64)]))
    assert "there, x" in clients.follow()
    assert (clients.find(b"\xbb" * 32), clients.find(b"\xaa" * 32)) == (None, "there")
    (folder / CLIENTS).write_bytes(b"nonsense")
    assert "stay as they were" in clients.follow()
    assert clients.follow() == ""
    assert clients.find(b"\xaa" * 32) == "there"
    (folder / CLIENTS).unlink()
    assert "stay as they were" in clients.follow()
