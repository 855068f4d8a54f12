"""Who may use the API: the keys of the file and of the environment, and what the limits of each have counted.

Owns the accounts, one per key name; they outlive a change of the file, which is noticed at the next request. Limits
are this replica's own. Called by the guard from the event loop only.
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections import deque
from typing import NamedTuple

from common import api_keys
from common.api_keys import Key
from common.errors import ConfigError

log = logging.getLogger("api")
MINUTE_S = 60.0
LEAST_WAIT_S = 0.001


class Excess(NamedTuple):
    """Why a request is over its key's limits, and when to come back (0: nobody knows)."""

    message: str
    wait_s: float


class Account:
    """One key, its open and recent requests, and the tokens that it has not worked off.

    Tokens are counted when a request ends, as many as it took: what max_tokens allows says little, and a reservation of
    it would refuse what fits. So a key may exceed its limit once, by what it has open, and then waits as long for it:
    its debt shrinks by the limit per minute, and requests come in while it is below a minute's worth.
    """

    __slots__ = ("_debt", "_debt_s", "_recent", "hash", "key", "open", "salt")

    def __init__(self, key: Key) -> None:
        self.open = 0
        self._debt = 0.0  # tokens, at the time `_debt_s`
        self._debt_s = 0.0
        self._recent: deque[float] = deque()  # when the requests of the last minute came
        self.change(key)

    def change(self, key: Key) -> None:
        """The same name with new limits, or a new key. What was counted stays counted."""
        self.key, self.salt, self.hash = key, bytes.fromhex(key.salt), bytes.fromhex(key.hash)

    def enter(self, now_s: float) -> Excess | None:
        """Counts a request, unless that is over a limit. Every request that entered must `leave`."""
        key, recent = self.key, self._recent
        debt = self._owed(now_s)
        if key.tokens_per_minute and debt >= key.tokens_per_minute:
            wait_s = (debt - key.tokens_per_minute) * MINUTE_S / key.tokens_per_minute
            text = f"this key may use {key.tokens_per_minute} tokens a minute, try again later"
            return Excess(text, max(wait_s, LEAST_WAIT_S))
        if key.requests and self.open >= key.requests:
            return Excess(f"{key.requests} requests of this key are open already, try again later", 0.0)
        if key.per_minute:
            self._forget(now_s)
            if len(recent) >= key.per_minute:
                wait_s = recent[len(recent) - key.per_minute] + MINUTE_S - now_s
                return Excess(f"this key may make {key.per_minute} requests a minute, try again later", wait_s)
            recent.append(now_s)
        self.open += 1
        return None

    def leave(self, now_s: float, tokens: int = 0) -> None:
        """The request has ended and took so many tokens of prompt and answers."""
        self.open -= 1
        if self.key.tokens_per_minute:
            self._debt, self._debt_s = self._owed(now_s) + tokens, now_s

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """What is left of the limits a minute, under OpenAI's names."""
        key, found = self.key, []
        if key.per_minute:
            self._forget(now_s)
            reset_s = self._recent[-1] + MINUTE_S - now_s if self._recent else 0.0
            found += _rates(b"requests", key.per_minute, key.per_minute - len(self._recent), reset_s)
        if limit := key.tokens_per_minute:
            debt = self._owed(now_s)
            found += _rates(b"tokens", limit, int(limit - debt), debt * MINUTE_S / limit)
        return found

    def _forget(self, now_s: float) -> None:
        recent = self._recent
        while recent and recent[0] <= now_s - MINUTE_S:
            recent.popleft()

    def _owed(self, now_s: float) -> float:
        return max(self._debt - (now_s - self._debt_s) * self.key.tokens_per_minute / MINUTE_S, 0.0)


def _rates(what: bytes, limit: int, remaining: int, reset_s: float) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % max(remaining, 0)),
        (b"x-ratelimit-reset-" + what, b"%.3fs" % max(reset_s, 0.0)),
    ]


class Keyring:
    """The keys of `path` (empty: no file), of `environment`, as VALENCE_API_KEYS has them, and of `administrators`.

    Raises ConfigError if they cannot be read. Later a file that cannot be read is logged, and its last keys stand.
    """

    def __init__(self, path: str, environment: str, administrators: str = "") -> None:
        self._path = path
        self._fixed = api_keys.given(environment) + api_keys.given(administrators, admin=True)
        self._accounts: dict[str, Account] = {}
        self._found: dict[bytes, Account] = {}  # by a hash under a secret of this process; keys that have been used
        self._own = secrets.token_bytes(32)
        self._seen = self._state()
        self._read()

    @property
    def needed(self) -> bool:
        """Whether requests need a key. A file without keys lets nobody in."""
        return bool(self._path or self._fixed)

    def find(self, secret: bytes) -> Account | None:
        """The account of a key. Takes the same time whichever key it is, or almost is."""
        self._follow()
        if len(secret) > api_keys.MAX_BYTES:
            return None
        mark = hashlib.blake2b(secret, key=self._own, digest_size=32).digest()
        if account := self._found.get(mark):
            return account
        found = None
        for account in self._accounts.values():
            if hmac.compare_digest(api_keys.digest(secret, account.salt), account.hash):
                found = account
        if found is not None:
            self._found[mark] = found
        return found

    def named(self, name: str) -> Account | None:
        """The account of a key by the key's name, of which somebody proved earlier to have it."""
        self._follow()
        return self._accounts.get(name)

    def _follow(self) -> None:
        """Reads the file again if it is another than last time."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self._read()
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
        else:
            log.info("API keys read again: %s", ", ".join(self._accounts) or "none")

    def _state(self) -> tuple[int, int, int] | None:
        if not self._path:
            return None
        try:
            now = os.stat(self._path)
        except OSError:
            return None
        return now.st_mtime_ns, now.st_size, now.st_ino

    def _read(self) -> None:
        keys = self._fixed + (api_keys.read(self._path) if self._path else [])
        api_keys.check_names(keys)
        accounts = {}
        for key in keys:
            account = self._accounts.get(key.name)
            if account is None:
                account = Account(key)
            else:
                account.change(key)
            accounts[key.name] = account
        self._accounts = accounts
        self._found.clear()
