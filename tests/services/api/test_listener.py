import socket
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.api.listener import listen
from tests.ports import free_port


def stranger(port: int, shared: bool) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def test_replicas_of_one_system_share_the_port(tmp_path: Path) -> None:
    port = free_port()
    first, second = (listen("127.0.0.1", port, tmp_path) for _ in range(2))
    first.close()
    third = listen("127.0.0.1", port, tmp_path)
    assert first.port == second.port == third.port == port and third.url == f"http://127.0.0.1:{port}"
    with socket.create_connection(("127.0.0.1", port)):
        pass
    second.close()
    third.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_of_another_program_is_an_error(tmp_path: Path, shared: bool) -> None:
    port = free_port()
    with stranger(port, shared), pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: Address already"):
        listen("127.0.0.1", port, tmp_path)
    listen("127.0.0.1", port, tmp_path).close()


def test_another_system_is_a_stranger(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ours = listen("127.0.0.1", port, tmp_path / "a")
    with pytest.raises(ConfigError):
        listen("127.0.0.1", port, tmp_path / "b")
    ours.close()


def test_port_zero_is_any_free_port(tmp_path: Path) -> None:
    first, second = (listen("127.0.0.1", 0, tmp_path) for _ in range(2))
    assert first.port != second.port
    first.close()
    second.close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_ours(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError):
        listen(host, free_port(), tmp_path)


def test_ipv6_addresses_are_bracketed(tmp_path: Path) -> None:
    listener = listen("::1", 0, tmp_path)
    assert listener.url == f"http://[::1]:{listener.port}"
    listener.close()
