"""Answers ZeroMQ's question whether the owner of a key may connect (ZAP, rfc.zeromq.org/spec/27).

One thread per process with keys, which sleeps but for handshakes: an event loop may be busy and the worker's blocking
loop is away for whole steps, yet peers must get in. It owns its socket and the allow-list; nobody waits for it. ZeroMQ
refuses everybody if it is not there. Only clients that know the server's public key get as far as a question.
"""

import logging
import threading

import zmq

from common.curve import AllowList, fingerprint

log = logging.getLogger("links")
ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"valence"
ALLOWED = b"200"
LATER = b"300"  # as 400, but the client tries again: it may be allowed a moment later
MAX_TOLD = 64  # unknown keys in the log


class Gatekeeper(threading.Thread):
    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", clients: AllowList) -> None:
        super().__init__(name="links-zap", daemon=True)
        self.clients = clients  # replaced as a whole
        self.refused = 0
        self._told: set[bytes] = set()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ENDPOINT)

    def run(self) -> None:
        while True:
            try:
                request = self._socket.recv_multipart()
                self._socket.send_multipart(self.answer(request))
            except zmq.ContextTerminated:
                self._socket.close()
                return

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to [version, request id, domain, address, identity, mechanism, key]."""
        name = self._client_of(request)
        status, text = (ALLOWED, b"OK") if name is not None else (LATER, b"not allowed")
        return [b"1.0", request[1] if len(request) > 1 else b"", status, text, (name or "").encode(), b""]

    def _client_of(self, request: list[bytes]) -> str | None:
        if len(request) != 7 or request[0] != b"1.0" or request[2] != DOMAIN or request[5] != b"CURVE":
            return None
        if told := self.clients.follow():
            log.warning("%s", told)
        name = self.clients.find(request[6])
        if name is None:
            self.refused += 1
            self._tell(request[6], request[3].decode(errors="replace"))
        return name

    def _tell(self, key: bytes, address: str) -> None:
        """Once per key: clients try again all the time."""
        if len(key) == 32 and key not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(key)
            log.warning("refused a link from %.64s: the key %s is not allowed", address, fingerprint(key.hex()))
