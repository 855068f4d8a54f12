from pathlib import Path

import pytest
import zmq

from common import curve
from common.curve import AllowList, Client
from common.transport_zap import ALLOWED, LATER, Gatekeeper

KEY, OTHER = b"\x01" * 32, b"\x02" * 32


@pytest.fixture
def keeper(tmp_path: Path):
    (tmp_path / curve.CLIENTS).write_bytes(curve.write_clients([Client("here", KEY.hex())]))
    context = zmq.Context()
    keeper = Gatekeeper(context, AllowList(tmp_path))
    keeper.start()
    yield keeper
    context.term()
    keeper.join(10)
    assert not keeper.is_alive()


def question(key: bytes, domain: bytes = b"valence", mechanism: bytes = b"CURVE") -> list[bytes]:
    return [b"1.0", b"17", domain, b"10.0.0.1", b"", mechanism, key]


def test_an_allowed_key_and_its_name(keeper: Gatekeeper) -> None:
    assert keeper.answer(question(KEY)) == [b"1.0", b"17", ALLOWED, b"OK", b"here", b""]


@pytest.mark.parametrize(
    "request_",
    [
        question(OTHER),
        question(b""),
        question(KEY[:31]),
        question(KEY, domain=b"other"),
        question(KEY, mechanism=b"PLAIN"),
        question(KEY)[:6],
        [b"2.0", *question(KEY)[1:]],
        [],
    ],
    ids=range(8),
)
def test_everything_else_is_refused(keeper: Gatekeeper, request_: list[bytes]) -> None:
    assert keeper.answer(request_)[2] == LATER


def test_unknown_keys_are_told_once_and_not_without_end(keeper: Gatekeeper, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(200):
        for _ in range(3):
            keeper.answer(question(number.to_bytes(32, "big")))
    assert keeper.refused == 600
    assert sum(record.msg.startswith("refused a link") for record in caplog.records) == 64


def test_the_list_may_change_under_it(keeper: Gatekeeper, tmp_path: Path) -> None:
    (tmp_path / curve.CLIENTS).write_bytes(curve.write_clients([Client("there", OTHER.hex()), Client("b", "3" * 64)]))
    assert keeper.answer(question(OTHER))[2] == ALLOWED
    assert keeper.answer(question(KEY))[2] == LATER
