from pathlib import Path

import pytest

from common import curve
from common.config import Links
from common.errors import ConfigError
from common.transport import secure
from valence import link_keys
from valence.errors import CommandError


def test_a_new_folder_is_private_and_can_be_used(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    link_keys.init(folder, "one")
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "server.key": 0o600,
        "client.key": 0o600,
        "clients": 0o600,
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    secure(Links(transport="tcp", host="10.1.1.1", keys_dir=str(folder)))
    secure(Links())
    with pytest.raises(CommandError, match="rotate"):
        link_keys.init(folder, "one")


def test_another_host_has_its_own_key_and_the_same_server(tmp_path: Path) -> None:
    link_keys.init(tmp_path / "a", "one")
    link_keys.add(tmp_path / "a", "two", tmp_path / "b")
    one, two = curve.read(tmp_path / "a"), curve.read(tmp_path / "b")
    assert one.server == two.server
    assert one.client != two.client
    names = [client.name for client in curve.read_clients(tmp_path / "b")]
    assert names == ["one", "two"] == [client.name for client in curve.read_clients(tmp_path / "a")]
    with pytest.raises(CommandError, match="already"):
        link_keys.add(tmp_path / "a", "two", tmp_path / "c")
    with pytest.raises(CommandError, match="not empty"):
        link_keys.add(tmp_path / "a", "three", tmp_path / "b")
    with pytest.raises(ConfigError, match="name of a host"):
        link_keys.add(tmp_path / "a", "thr ee", tmp_path / "d")
    link_keys.remove(tmp_path / "a", "two")
    assert [client.name for client in curve.read_clients(tmp_path / "a")] == ["one"]
    with pytest.raises(CommandError, match="no host"):
        link_keys.remove(tmp_path / "a", "two")
    with pytest.raises(CommandError, match="own key"):
        link_keys.remove(tmp_path / "a", "one")


def test_rotation_replaces_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        link_keys.rotate(tmp_path / "keys", "one")
    link_keys.init(tmp_path / "keys", "one")
    before = curve.read(tmp_path / "keys")
    link_keys.rotate(tmp_path / "keys", "one")
    after = curve.read(tmp_path / "keys")
    assert not {before.server.public, before.client.public} & {after.server.public, after.client.public}
    assert [client.public for client in curve.read_clients(tmp_path / "keys")] == [after.client.public]


def test_the_listing_has_fingerprints_only(tmp_path: Path) -> None:
    link_keys.init(tmp_path / "keys", "one")
    keys = curve.read(tmp_path / "keys")
    rows = link_keys.listed(tmp_path / "keys")
    assert [row["host"] for row in rows] == ["all", "one"]
    assert not any(pair.secret in str(rows) or pair.public in str(rows) for pair in (keys.server, keys.client))
    (tmp_path / "keys" / "clients").write_bytes(b"")
    assert "NOT allowed" in link_keys.listed(tmp_path / "keys")[-1]["key"]
    with pytest.raises(ConfigError, match="not among the allowed clients"):
        secure(Links(transport="tcp", keys_dir=str(tmp_path / "keys")))


def test_a_pair_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    link_keys.init(tmp_path / "keys", "one")
    other = link_keys.make_pair()
    text = (tmp_path / "keys" / "server.key").read_text()
    wrong = text.replace(curve.read(tmp_path / "keys").server.public, other.public)
    (tmp_path / "keys" / "server.key").write_text(wrong)
    with pytest.raises(ConfigError, match="do not belong together"):
        secure(Links(transport="tcp", keys_dir=str(tmp_path / "keys")))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="cannot make"):
        link_keys.init(tmp_path / "file" / "keys", "one")
