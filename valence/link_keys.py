"""Makes and changes the keys of tcp links (common/curve.py says what lies in the folder). The only writer of them.

Every file is written whole beside its place and then renamed, mode 0600, so that a process that reads meanwhile sees
the old one or the new one.
"""

import contextlib
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from common import curve
from common.curve import CLIENT, CLIENTS, SERVER, Client, KeyPair, fingerprint
from common.errors import ConfigError
from valence.errors import CommandError

HOST = re.compile(r"[A-Za-z0-9._-]{1,64}")


def make_pair() -> KeyPair:
    """A new Curve25519 pair from libzmq, which takes it from libsodium or the kernel."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret).hex())


def this_host() -> str:
    """This host's name, as far as it can name a key."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "host"


def init(folder: Path, host: str) -> None:
    """New keys in a folder that has none. Raises CommandError if it has some."""
    for name in (SERVER, CLIENT, CLIENTS):
        if os.path.lexists(folder / name):
            raise CommandError(f"{folder / name} is there already; `valence keys links rotate` makes new keys")
    _write_all(folder, make_pair(), make_pair(), host)


def rotate(folder: Path, host: str) -> None:
    """New keys instead of all old ones; hosts that were added must be added again. Raises ConfigError, CommandError."""
    curve.read(folder)  # only where keys are
    _write_all(folder, make_pair(), make_pair(), host)


def add(folder: Path, host: str, target: Path) -> None:
    """A folder for another host at `target`, whose client key is allowed here and there. Raises CommandError."""
    keys, clients = curve.read(folder), curve.read_clients(folder)
    if any(client.name == host for client in clients):
        raise CommandError(f"there is a host {host} already; remove it first")
    if target.exists() and any(target.iterdir()):
        raise CommandError(f"{target} is not empty")
    pair = make_pair()
    clients.append(_client(host, pair))
    _make_folder(target)
    _write(target / SERVER, msgspec.json.encode(keys.server))
    _write(target / CLIENT, msgspec.json.encode(pair))
    _write(target / CLIENTS, curve.write_clients(clients))
    _write(folder / CLIENTS, curve.write_clients(clients))  # last: nobody is allowed whose key is not kept


def remove(folder: Path, host: str) -> None:
    """Takes a host's key off this folder's list. Raises CommandError if it is not on it, or is this folder's own."""
    keys, clients = curve.read(folder), curve.read_clients(folder)
    rest = [client for client in clients if client.name != host]
    if len(rest) == len(clients):
        raise CommandError(f"there is no host {host!r} in {folder / CLIENTS}")
    if all(client.public != keys.client.public for client in rest):
        raise CommandError(f"{host} is this folder's own key; to replace it use `valence keys links rotate`")
    _write(folder / CLIENTS, curve.write_clients(rest))


def listed(folder: Path) -> list[dict[str, Any]]:
    """One record per key, public parts only, as fingerprints."""
    keys, clients = curve.read(folder), curve.read_clients(folder)
    own = keys.client.public
    rows = [{"key": "server", "host": "all", "fingerprint": fingerprint(keys.server.public)}]
    for client in clients:
        kind = "client (this host)" if client.public == own else "client"
        rows.append({"key": kind, "host": client.name, "fingerprint": fingerprint(client.public)})
    if all(client.public != own for client in clients):
        rows.append({"key": "client (NOT allowed)", "host": "this one", "fingerprint": fingerprint(own)})
    return rows


def _client(host: str, pair: KeyPair) -> Client:
    if not HOST.fullmatch(host):
        raise ConfigError("the name of a host is 1 to 64 letters, digits, dots, hyphens and underscores")
    return Client(host, pair.public)


def _write_all(folder: Path, server: KeyPair, client: KeyPair, host: str) -> None:
    clients = curve.write_clients([_client(host, client)])
    _make_folder(folder)
    _write(folder / CLIENTS, clients)
    _write(folder / SERVER, msgspec.json.encode(server))
    _write(folder / CLIENT, msgspec.json.encode(client))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot make {folder}: {error.strerror}") from error


def _write(path: Path, content: bytes) -> None:
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # of mode 0600
    except OSError as error:
        raise CommandError(f"cannot write to {path.parent}: {error.strerror}") from error
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
