from pathlib import Path

import pytest

from common import api_keys
from common.errors import ConfigError


def test_a_file_holds_no_key_and_loads_to_itself(tmp_path: Path) -> None:
    secrets = [api_keys.make_secret() for _ in range(2)]
    keys = [api_keys.make("ann", secrets[0], requests=3), api_keys.make("bob", secrets[1], per_minute=60)]
    file = tmp_path / "keys"
    file.write_bytes(api_keys.write(keys) + b"\n")
    assert api_keys.read(file) == keys
    assert not any(secret.encode() in file.read_bytes() for secret in secrets)
    for key, secret in zip(keys, secrets, strict=True):
        assert api_keys.digest(secret.encode(), bytes.fromhex(key.salt)).hex() == key.hash


def test_keys_are_long_random_and_salted() -> None:
    made = {api_keys.make_secret() for _ in range(100)}
    assert len(made) == 100 and all(len(secret) == len(api_keys.PREFIX) + 43 for secret in made)
    one, other = (api_keys.make("ann", "same") for _ in range(2))
    assert one.hash != other.hash


@pytest.mark.parametrize(
    "line",
    [
        b"secret-in-plain",
        b'{"name": "secret-in-plain"}',
        b'{"name": "a", "salt": "00", "hash": "secret-in-plain"}',
        b'{"name": "a b", "salt": "%b", "hash": "%b"}' % (b"0" * 32, b"0" * 64),
        b'{"name": "a", "salt": "%b", "hash": "%b", "requests": -1}' % (b"0" * 32, b"0" * 64),
        b'{"name": "a", "salt": "%b", "hash": "%b", "quota": 1}' % (b"0" * 32, b"0" * 64),
        b"\xff\xfe",
    ],
)
def test_a_bad_line_is_told_by_number_and_not_quoted(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(api_keys.write([api_keys.make("ann", "x")]) + line + b"\n")
    with pytest.raises(ConfigError, match="line 2") as error:
        api_keys.read(file)
    assert "secret-in-plain" not in str(error.value)


def test_an_absent_file_and_two_keys_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api\.keys_file: cannot read"):
        api_keys.read(tmp_path / "absent")
    file = tmp_path / "keys"
    file.write_bytes(api_keys.write([api_keys.make("ann", "x"), api_keys.make("ann", "y")]))
    with pytest.raises(ConfigError, match="two API keys have the name ann"):
        api_keys.read(file)


def test_keys_of_the_environment() -> None:
    keys = api_keys.given(" ann=vl-1, vl-2\nbob=with=sign ")
    assert [key.name for key in keys] == ["ann", "environment-2", "bob"]
    for key, secret in zip(keys, (b"vl-1", b"vl-2", b"with=sign"), strict=True):
        assert api_keys.digest(secret, bytes.fromhex(key.salt)).hex() == key.hash


@pytest.mark.parametrize("text", ["ann=", "=hidden", "ok,a/b=hidden", "ok hiddenü", "ann=1 ann=2", "x" * 600, ",,"])
def test_bad_keys_of_the_environment_are_not_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        api_keys.given(text)
    assert "hidden" not in str(error.value)


def test_names_are_short_words() -> None:
    for name in ("", "a b", "a/b", "x" * 65, "a\n"):
        with pytest.raises(ConfigError, match="name of a key"):
            api_keys.make(name, "x")


def test_a_file_that_others_can_change_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(api_keys.write([api_keys.make("ann", "one")]))
    file.chmod(0o644)
    assert [key.name for key in api_keys.read(file)] == ["ann"]
    file.chmod(0o646)
    with pytest.raises(ConfigError, match="other users can change"):
        api_keys.read(file)


def test_keys_of_administrators() -> None:
    [key] = api_keys.given("root=one", admin=True)
    assert key.admin and not api_keys.given("root=one")[0].admin
    assert api_keys.given("one", admin=True)[0].name == "admin-1"
    with pytest.raises(ConfigError, match="VALENCE_ADMIN_KEYS: entry 2"):
        api_keys.given("a b=" + "x" * 600, admin=True)
