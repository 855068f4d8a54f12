"""API keys as they are kept: hashed, one JSON object a line, with the limits of each.

`valence keys` writes the file, every API replica reads it. The key itself is in no file: it is shown once, when it is
made. Pure but for `read`.
"""

import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from common.errors import ConfigError
from common.run_dir import others_can_write

PREFIX = "vl-"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
VISIBLE = re.compile(r"[!-~]{1,512}")
MAX_BYTES = 512  # of a key; longer ones are not looked at
Name = Annotated[str, Meta(pattern=rf"\A{NAME.pattern}\Z")]
Limit = Annotated[int, Meta(ge=0, le=1_000_000)]
MAX_WEIGHT = 1000
SOONEST, LATEST = -100, 100  # priorities; the scheduler knows no others
Priority = Annotated[int, Meta(ge=SOONEST, le=LATEST)]


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: Name
    salt: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    hash: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    requests: Limit = 0  # open at once, per API replica; 0: no limit
    per_minute: Limit = 0  # requests in any 60 s, per API replica; 0: no limit
    admin: bool = False  # may use administrative routes, too
    tokens_per_minute: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0  # of prompts and answers; the same
    weight: Annotated[int, Meta(ge=1, le=MAX_WEIGHT)] = 1  # share of the tokens, against those of other keys
    priority: Priority = 0  # of requests that name none; smaller is sooner, among those of this key
    soonest: Priority = SOONEST  # the smallest that a request can have


DECODER = msgspec.json.Decoder(Key)


def digest(secret: bytes, salt: bytes) -> bytes:
    """The hash of a key under a salt of 16 bytes; 32 bytes.

    A key holds 256 random bits, so there is no dictionary to try against a stolen file: one fast hash is as safe as a
    slow one, and each request can afford it. The salt keeps equal keys of two files from showing.
    """
    return hashlib.blake2b(secret, salt=salt, person=b"valence-api-key", digest_size=32).digest()


def make_secret() -> str:
    """A new key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def make(name: str, secret: str, requests: int = 0, per_minute: int = 0, **limits: int) -> Key:
    """The entry of a key; `limits` are further fields. Raises ConfigError if one of these cannot be."""
    if not NAME.fullmatch(name):
        raise ConfigError("the name of a key is 1 to 64 letters, digits, dots, hyphens and underscores")
    salt = secrets.token_bytes(16)
    key = Key(name, salt.hex(), digest(secret.encode(), salt).hex())
    return with_limits(key, requests=requests, per_minute=per_minute, **limits)


def with_limits(key: Key, **limits: int) -> Key:
    """The same key with other limits. Raises ConfigError for one that is out of range."""
    try:
        return msgspec.convert(msgspec.structs.asdict(key) | limits, Key)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the key {key.name}: {str(error).replace('$.', '')}") from None


def read(path: str | Path) -> list[Key]:
    """The keys of a file. Raises ConfigError, which never quotes the file."""
    try:
        with open(path, "rb") as file:
            if others_can_write(os.fstat(file.fileno())):
                raise ConfigError(
                    f"api.keys_file: other users can change {path}, and so let themselves in; chmod 600 it"
                )
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"api.keys_file: cannot read {path}: {error.strerror}") from error
    keys = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                keys.append(DECODER.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                where = f"api.keys_file: line {number} of {path}"
                raise ConfigError(f"{where} is none that `valence keys add` writes") from None
    check_names(keys)
    return keys


def write(keys: list[Key]) -> bytes:
    """The text of a file."""
    return b"".join(msgspec.json.encode(key) + b"\n" for key in keys)


def given(text: str, admin: bool = False) -> list[Key]:
    """Keys of VALENCE_API_KEYS: `name=key` or just a key, separated by commas or spaces. Raises ConfigError.

    With `admin` those of VALENCE_ADMIN_KEYS, in the same form.
    """
    variable = "VALENCE_ADMIN_KEYS" if admin else "VALENCE_API_KEYS"
    keys: list[Key] = []
    if not text.strip():
        return keys
    for number, entry in enumerate(re.split(r"[\s,]+", text.strip(", \t\n")), start=1):
        name, separator, secret = entry.partition("=")
        if not separator:
            name, secret = f"{'admin' if admin else 'environment'}-{number}", entry
        if not (NAME.fullmatch(name) and VISIBLE.fullmatch(secret)):
            raise ConfigError(f"{variable}: entry {number} is neither name=key nor a key")
        keys.append(msgspec.structs.replace(make(name, secret), admin=admin))
    check_names(keys)
    return keys


def check_names(keys: list[Key]) -> None:
    """Raises ConfigError if two keys have one name."""
    names = [key.name for key in keys]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two API keys have the name {name}")
