import logging
import os
from pathlib import Path

import pytest

from common import api_keys
from common.api_keys import Key
from common.errors import ConfigError
from services.api.keys import Account, Keyring


def store(file: Path, *keys: Key) -> None:
    """As `valence keys` does: the file is replaced as a whole."""
    new = file.with_suffix(".new")
    new.write_bytes(api_keys.write(list(keys)))
    os.replace(new, file)


def name_of(keyring: Keyring, secret: str) -> str | None:
    account = keyring.find(secret.encode())
    return account.key.name if account else None


def test_without_file_and_environment_no_key_is_needed() -> None:
    assert not Keyring("", " ").needed


def test_keys_of_file_and_environment_are_found_again_and_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    store(file, api_keys.make("ann", "one"))
    keyring = Keyring(str(file), "bob=two,three")
    assert keyring.needed
    for _ in range(2):
        found = [name_of(keyring, secret) for secret in ("one", "two", "three", "four", "", "on", "onee", "x" * 9999)]
        assert found == ["ann", "bob", "environment-2", None, None, None, None, None]


def test_a_file_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    store(file)
    keyring = Keyring(str(file), "")
    assert keyring.needed and name_of(keyring, "") is None


def test_a_changed_file_counts_from_the_next_request_on(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    ann, bob = api_keys.make("ann", "one", requests=1), api_keys.make("bob", "two")
    store(file, ann)
    keyring = Keyring(str(file), "")
    account = keyring.find(b"one")
    assert account is not None and account.enter(0.0) is None and account.enter(0.0) is not None
    store(file, ann, bob)
    assert name_of(keyring, "two") == "bob" and name_of(keyring, "one") == "ann"
    assert account.enter(0.0) is not None  # what is open still counts
    store(file, Key(ann.name, ann.salt, ann.hash, requests=2), bob)
    assert keyring.find(b"one") is account and account.enter(0.0) is None
    store(file, bob)
    assert name_of(keyring, "one") is None and name_of(keyring, "two") == "bob"
    store(file, api_keys.make("bob", "new"))
    assert name_of(keyring, "two") is None and name_of(keyring, "new") == "bob"


def test_a_file_that_breaks_leaves_the_keys_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    store(file, api_keys.make("ann", "one"))
    keyring = Keyring(str(file), "bob=two")
    with caplog.at_level(logging.INFO, "api"):
        file.write_text("broken-secret\n")
        assert [name_of(keyring, "one") for _ in range(3)] == ["ann"] * 3
        file.unlink()
        assert name_of(keyring, "one") == "ann"
        store(file, api_keys.make("bob", "three"))  # the environment has one of that name
        assert name_of(keyring, "three") is None
        store(file, api_keys.make("eve", "three"))
        assert name_of(keyring, "three") == "eve" and name_of(keyring, "one") is None
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "ERROR", "INFO"]
    assert "broken-secret" not in caplog.text and "three" not in caplog.text


def test_what_cannot_be_read_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        Keyring(str(tmp_path / "absent"), "")
    file = tmp_path / "keys"
    store(file, api_keys.make("ann", "one"))
    with pytest.raises(ConfigError, match="two API keys have the name ann"):
        Keyring(str(file), "ann=two")


def test_open_requests_are_limited() -> None:
    account = Account(api_keys.make("ann", "one", requests=2))
    assert account.enter(0.0) is None and account.enter(0.0) is None
    excess = account.enter(0.0)
    assert excess is not None and "2 requests" in excess.message and excess.wait_s == 0
    account.leave(0.0)
    assert account.enter(0.0) is None


def test_tokens_are_charged_at_the_end_and_worked_off() -> None:
    account = Account(api_keys.make("ann", "one", tokens_per_minute=600))
    assert account.enter(0.0) is None and account.enter(0.0) is None
    account.leave(0.0, 400)
    assert account.enter(0.0) is None  # nobody knows yet what the open ones take
    account.leave(0.0, 700)
    excess = account.enter(0.0)
    assert excess is not None and "600 tokens" in excess.message and excess.wait_s == 50.0
    assert account.enter(49.9) is not None and account.enter(50.1) is None
    account.leave(50.1, 0)
    assert account.headers(50.1)[1] == (b"x-ratelimit-remaining-tokens", b"1")


def test_what_is_left_is_told_in_openais_words() -> None:
    account = Account(api_keys.make("ann", "one", per_minute=3, tokens_per_minute=600))
    account.enter(10.0)
    account.enter(40.0)
    account.leave(40.0, 150)
    assert dict(account.headers(40.0)) == {
        b"x-ratelimit-limit-requests": b"3",
        b"x-ratelimit-remaining-requests": b"1",
        b"x-ratelimit-reset-requests": b"60.000s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"450",
        b"x-ratelimit-reset-tokens": b"15.000s",
    }
    assert dict(account.headers(200.0))[b"x-ratelimit-remaining-requests"] == b"3"
    assert Account(api_keys.make("bob", "two", requests=5)).headers(0.0) == []


def test_a_changed_limit_forgets_no_tokens() -> None:
    key = api_keys.make("ann", "one", tokens_per_minute=600)
    account = Account(key)
    account.enter(0.0)
    account.leave(0.0, 500)
    account.change(api_keys.with_limits(key, tokens_per_minute=400))
    assert account.enter(0.0) is not None


def test_requests_of_any_minute_are_limited_and_the_wait_is_exact() -> None:
    account = Account(api_keys.make("ann", "one", per_minute=2))
    assert account.enter(100.0) is None and account.enter(130.0) is None
    for now_s, wait_s in ((130.0, 30.0), (159.5, 0.5)):
        excess = account.enter(now_s)
        assert excess is not None and excess.wait_s == wait_s
    assert account.enter(160.0) is None
    excess = account.enter(160.0)
    assert excess is not None and excess.wait_s == 30.0
