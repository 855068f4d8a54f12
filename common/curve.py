"""Keys of tcp links as they lie in a folder, and the list of clients that may connect.

`valence keys links` writes the folder, every process reads it (transport.py, transport_zap.py). `server.key` is the
pair of all inboxes of a deployment, `client.key` the pair that this host's processes connect with, `clients` the
allowed public keys. Keys are 32 bytes, written as hex. Pure but for reading; only ZeroMQ makes keys.
"""

import hashlib
import os
import stat
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from common.errors import ConfigError

SERVER, CLIENT, CLIENTS = "server.key", "client.key", "clients"
MAX_FILE_BYTES = 1 << 20
Hex = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
HostName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")]


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public: Hex
    secret: Hex

    @property
    def public_bytes(self) -> bytes:
        return bytes.fromhex(self.public)

    @property
    def secret_bytes(self) -> bytes:
        return bytes.fromhex(self.secret)

    def __repr__(self) -> str:
        return f"KeyPair({fingerprint(self.public)})"


class Client(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of `clients`: a host, or another group of processes with a key of its own."""

    name: HostName
    public: Hex


class LinkKeys(NamedTuple):
    folder: Path
    server: KeyPair
    client: KeyPair


PAIR = msgspec.json.Decoder(KeyPair)
LINE = msgspec.json.Decoder(Client)


def fingerprint(public: str) -> str:
    """A short name of a public key for people to compare: 32 hex digits of its BLAKE2b hash."""
    return hashlib.blake2b(bytes.fromhex(public), digest_size=16, person=b"valence-link-key").hexdigest()


def read(folder: Path) -> LinkKeys:
    """The keys of this host. Raises ConfigError, which never quotes a file."""
    return LinkKeys(folder, read_pair(folder / SERVER), read_pair(folder / CLIENT))


def read_pair(path: Path) -> KeyPair:
    """Raises ConfigError if it cannot be read, or somebody else can."""
    try:
        return PAIR.decode(_read(path, secret=True))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConfigError(f"links.keys_dir: {path} is no file that `valence keys links` writes") from None


def read_clients(folder: Path) -> list[Client]:
    """The allowed clients. Raises ConfigError if the file cannot be read, or somebody else can write it."""
    path = folder / CLIENTS
    clients = []
    for number, line in enumerate(_read(path, secret=False).splitlines(), start=1):
        if line.strip():
            try:
                clients.append(LINE.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                where = f"links.keys_dir: line {number} of {path}"
                raise ConfigError(f"{where} is none that `valence keys links` writes") from None
    return clients


def write_clients(clients: list[Client]) -> bytes:
    """The text of `clients`."""
    return b"".join(msgspec.json.encode(client) + b"\n" for client in clients)


def _read(path: Path, secret: bool) -> bytes:
    """A file that is ours or root's. The rule for secrets is the one that ssh and PostgreSQL have.

    Links are followed, as orchestrators mount secrets that way: what counts is the file at the end.
    """
    try:
        _check_folder(path.parent)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = "; make keys with `valence keys links init`" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"links.keys_dir: cannot read {path}: {error.strerror}{hint}") from error
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"links.keys_dir: {path} is no file")
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"links.keys_dir: {path} belongs to user {found.st_uid}, not to this one or root")
        # A file of root's may be readable by a group: that is how a container gets it.
        hidden = (0o037 if found.st_uid != os.geteuid() else 0o077) if secret else 0o022
        if found.st_mode & hidden:
            what, repair = ("read", "600") if secret else ("change", "644")
            raise ConfigError(f"links.keys_dir: others can {what} {path}; chmod {repair} it, and think of new keys")
        content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"links.keys_dir: {path} is larger than {MAX_FILE_BYTES} bytes")
        return content


def _check_folder(folder: Path) -> None:
    found = os.stat(folder)
    if found.st_uid not in (0, os.geteuid()) or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
        raise ConfigError(f"links.keys_dir: others can change {folder}; it must be this user's and chmod 700")


class AllowList:
    """The clients of a folder, read again when the file is another than last time. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if it cannot be read. Later such a file is told, once, and the last list stands."""
        self._folder = folder
        self._seen = self._state()
        self._names = self._read()

    def find(self, public: bytes) -> str | None:
        """The name of an allowed client; None for any other key."""
        return self._names.get(public)

    def follow(self) -> str:
        """Looks at the file again. What to log about it, empty if nothing has changed."""
        state = self._state()
        if state == self._seen:
            return ""
        self._seen = state
        try:
            self._names = self._read()
        except ConfigError as error:
            return f"the allowed clients stay as they were: {error}"
        return f"allowed clients read again: {', '.join(sorted(self._names.values())) or 'none'}"

    def _read(self) -> dict[bytes, str]:
        return {bytes.fromhex(client.public): client.name for client in read_clients(self._folder)}

    def _state(self) -> tuple[int, int, int] | None:
        try:
            now = os.stat(self._folder / CLIENTS)
        except OSError:
            return None
        return now.st_mtime_ns, now.st_size, now.st_ino
