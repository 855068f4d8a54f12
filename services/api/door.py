"""The only container with a network: makes listening sockets at `api.host`:`api.port` and gives one to each replica.

`python -m services.api.door`. A socket stays in the network in which it was made, whoever accepts from it; so replicas
need none (docs/adr/0023-containers.md). It reads nothing that clients send. A replica keeps its link to the door open:
when that ends, the door's network may be gone, and the replica ends too. Owns nothing but the links.
"""

import asyncio
import logging
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from common import config as configuration
from common import env, log
from common.config import Config
from common.errors import ConfigError
from common.lifecycle import end_on_config
from common.run_dir import make_run_dir
from services.api.listener import bind, resolve

WAIT_S = 10.0  # for the door to be there
LOOK_S = 0.1
BACKLOG = 16

logger = logging.getLogger("door")


class Door:
    """Listens in the run directory, which only this user can enter."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError if the address cannot be had."""
        if not config.api.port:
            raise ConfigError("api.port is 0, and every socket of a door is to have the same port")
        self._family, self._address = resolve(config.api.host, config.api.port, "api.port")
        bind(self._family, self._address, "api.port", shared=False).close()
        path = path_of(config.run_dir)
        path.unlink(missing_ok=True)  # of a predecessor; two doors of one run directory have two networks
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen(BACKLOG)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)

    def serve(self) -> NoReturn:
        """Until a signal ends the process."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    self._give(self._server.accept()[0])
                else:
                    self._selector.unregister(key.fileobj)
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.close()

    def _give(self, link: socket.socket) -> None:
        """Keeps no copy: connections go to those who hold a socket. The second byte says that the copy is closed."""
        try:
            with bind(self._family, self._address, "api.port", shared=True) as sock:
                socket.send_fds(link, [b"."], [sock.fileno()])
            link.send(b".")
        except OSError:
            link.close()  # the replica has gone meanwhile
            return
        self._selector.register(link, selectors.EVENT_READ)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


def path_of(run_dir: Path) -> Path:
    return run_dir / "door"


class Link:
    """A replica's end. `sock` is bound and does not listen yet."""

    def __init__(self, run_dir: Path, wait_s: float = WAIT_S) -> None:
        """Raises ConfigError if no door answers in time."""
        path, end_s = path_of(run_dir), time.monotonic() + wait_s
        while True:
            self._link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._link.settimeout(max(end_s - time.monotonic(), LOOK_S))
                self._link.connect(str(path))
                _, fds, _, _ = socket.recv_fds(self._link, 1, 1)
                if fds and self._link.recv(1):
                    break
                for fd in fds:
                    os.close(fd)
                problem = "it hung up"
            except OSError as error:
                problem = error.strerror or str(error)
            self._link.close()
            if time.monotonic() >= end_s:
                raise ConfigError(f"api.door is set and no door answers at {path}: {problem}")
            time.sleep(LOOK_S)
        os.set_inheritable(fds[0], False)
        self._link.setblocking(False)
        self.sock = socket.socket(fileno=fds[0])
        self.sock.setblocking(False)

    async def watch(self) -> NoReturn:
        """Raises RuntimeError when the door has gone: nobody can reach `sock` any more."""
        await asyncio.get_running_loop().sock_recv(self._link, 1)
        raise RuntimeError("the door has gone; ending, to listen afresh")

    def close(self) -> None:
        self._link.close()
        self.sock.close()


def _on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _on_signal)
    try:
        env.check()
        config = configuration.load(env.config_path(), env.settings() + sys.argv[1:])
        make_run_dir(config.run_dir)
        log.set_up("door", config.log.level, config.log.format)
        door = Door(config)
    except ConfigError as error:
        end_on_config(error)
    logger.info("sockets at %s:%d for whoever asks", config.api.host, config.api.port)
    try:
        door.serve()
    finally:
        door.close()


if __name__ == "__main__":
    main()
