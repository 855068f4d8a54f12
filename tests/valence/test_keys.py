import stat
import threading
from pathlib import Path

import pytest

from common import api_keys
from common.errors import ConfigError
from services.api.keys import Keyring
from tests.valence.test___main__ import valence
from valence.errors import CommandError
from valence.keys import add, change, listed, remove

UNSET = {"admin": False, "tokens_per_minute": 0, "weight": 1, "priority": 0, "soonest": -100}


def test_a_key_is_made_used_and_taken_back(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    ann = add(file, "ann", requests=4, per_minute=60)
    bob = add(file, "bob")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert listed(file) == [
        {"name": "ann", "requests": 4, "per_minute": 60, **UNSET},
        {"name": "bob", "requests": 0, "per_minute": 0, **UNSET},
    ]
    keyring = Keyring(str(file), "")
    found = keyring.find(ann.encode())
    assert found is not None and (found.key.name, found.key.requests, found.key.per_minute) == ("ann", 4, 60)
    remove(file, "ann")
    assert keyring.find(ann.encode()) is None and keyring.find(bob.encode()) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_mistakes_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    add(file, "ann")
    before = file.read_bytes()
    with pytest.raises(CommandError, match="a key ann already"):
        add(file, "ann")
    with pytest.raises(CommandError, match="no key 'bob'"):
        remove(file, "bob")
    with pytest.raises(ConfigError, match="name of a key"):
        add(file, "a b")
    with pytest.raises(CommandError, match="cannot open"):
        add(tmp_path / "absent" / "keys", "ann")
    with pytest.raises(ConfigError, match="cannot read"):
        listed(tmp_path / "absent")
    file.write_bytes(before + b"broken\n")
    with pytest.raises(ConfigError, match="line 2"):
        add(file, "bob")
    assert file.read_bytes() == before + b"broken\n"


def test_limits_change_and_the_key_stays(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    secret = add(file, "ann", requests=4, weight=2)
    keyring = Keyring(str(file), "")
    account = keyring.find(secret.encode())
    assert account is not None
    account.enter(0.0)
    change(file, "ann", weight=5, tokens_per_minute=1000, priority=-3, soonest=-5)
    assert listed(file) == [
        {"name": "ann", "requests": 4, "per_minute": 0, "tokens_per_minute": 1000, "weight": 5}
        | {"priority": -3, "soonest": -5, "admin": False}
    ]
    assert keyring.find(secret.encode()) is account and (account.key.weight, account.open) == (5, 1)
    with pytest.raises(CommandError, match="no key 'bob'"):
        change(file, "bob", weight=1)
    for limits in ({"weight": 0}, {"priority": 101}, {"requests": -1}, {"tokens_per_minute": 10**10}):
        with pytest.raises(ConfigError, match="the key ann"):
            change(file, "ann", **limits)
    assert listed(file)[0]["weight"] == 5


def test_commands_at_once_lose_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    threads = [threading.Thread(target=add, args=(file, f"key-{i}")) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in api_keys.read(file)} == {f"key-{i}" for i in range(8)}


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    file, link = tmp_path / "keys", tmp_path / "link"
    link.symlink_to(file)
    add(link, "ann")
    assert link.is_symlink() and [row["name"] for row in listed(file)] == ["ann"]


def test_the_command_prints_the_key_once(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    setting = ("--set", f"api.keys_file={file}")
    made = valence("keys", "add", "ann", "--requests", "2", *setting)
    assert made.returncode == 0 and made.stdout.startswith(api_keys.PREFIX) and made.stderr == ""
    secret = made.stdout.strip()
    assert Keyring(str(file), "").find(secret.encode()) is not None
    table = valence("keys", "list", "--file", str(file), "--json").stdout
    assert '"ann"' in table and secret not in table and api_keys.read(file)[0].hash not in table
    assert valence("keys", "set", "ann", "--weight", "3", "--priority", "-2", *setting).returncode == 0
    assert listed(file)[0] | {"weight": 3, "requests": 2, "priority": -2} == listed(file)[0]
    assert valence("keys", "set", "bob", "--weight", "3", *setting).returncode == 1
    assert valence("keys", "remove", "ann", *setting).returncode == 0 and listed(file) == []
    unnamed = valence("keys", "add", "ann")
    assert unnamed.returncode == 1 and "--file" in unnamed.stderr
