"""Ports for servers that tests start: not those that the kernel gives to outgoing connections, and each process of a
test run has some of its own, so that nobody else takes a port between its choice and its use."""

import itertools
import os
import socket

FIRST, SHARE = 20_000, 1_500  # below 32,768, where Linux begins to give ports away
_places = itertools.cycle(range(SHARE))


def free_port() -> int:
    """On 127.0.0.1, and the next one most likely too."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    for place in itertools.islice(_places, SHARE):
        port = FIRST + SHARE * process + place
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"no port is free from {FIRST + SHARE * process} on")
