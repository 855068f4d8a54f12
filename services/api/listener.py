"""The listening socket, shared by the API replicas of one system and by nobody else.

Replicas bind the same port with SO_REUSEPORT; the kernel spreads connections over them. That option would also let
us share with a stranger that uses it, so the first replica probes the port without it. A file lock in the run
directory tells whether a sibling listens; the kernel drops it with the process.
"""

import fcntl
import os
import socket
from pathlib import Path

from common.errors import ConfigError
from common.locks import try_lock

BACKLOG = 2048


class Listener:
    """`sock` listens at `host`:`port`. The lock (-1: none) is held until `close`."""

    def __init__(self, sock: socket.socket, lock: int) -> None:
        self.sock = sock
        self._lock = lock
        self.host, self.port = sock.getsockname()[:2]

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        self.sock.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def listen(host: str, port: int, run_dir: Path, setting: str = "api.port") -> Listener:
    """Binds and listens. Port 0 takes any free port, for this replica alone. `setting` names the port in errors.

    Raises ConfigError if the address cannot be had, or another program has the port.
    """
    family, address = resolve(host, port, setting)
    if port == 0:
        return listening(bind(family, address, setting, shared=False), -1)
    mutex = os.open(run_dir / f"api-{port}.starting", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    lock = os.open(run_dir / f"api-{port}.listening", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(mutex, fcntl.LOCK_EX)  # one replica at a time probes, as probes see each other
        if try_lock(lock):
            bind(family, address, setting, shared=False).close()  # binds only: a listening stranger refuses it
        sock = bind(family, address, setting, shared=True)
        fcntl.flock(lock, fcntl.LOCK_SH)
    except ConfigError:
        os.close(lock)
        raise
    finally:
        os.close(mutex)
    return listening(sock, lock)


def resolve(host: str, port: int, setting: str) -> tuple[int, object]:
    """Address family and address. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"{setting.replace('port', 'host')} {host}: {error.strerror}") from error
    return family, address


def listening(sock: socket.socket, lock: int) -> Listener:
    sock.listen(BACKLOG)
    return Listener(sock, lock)


def bind(family: int, address: object, setting: str, shared: bool) -> socket.socket:
    """Raises ConfigError if it cannot be had. `shared`: others of this user may bind it, too."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    sock.setblocking(False)
    try:
        sock.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        sock.close()
        where = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another {setting}") from error
    return sock
