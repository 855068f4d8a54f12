"""`python -m tests.services.worker.fake_rank WAY FD PARENT`: a rank that loads no model.

WAY is a folder, where it notes each message that it gets, or a number: it then ends with that status after the first.
"""

import sys
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from services.worker.ranks import FromLeader, Join

DECODER = msgspec.msgpack.Decoder(FromLeader)


def main() -> None:
    link = Connection(int(sys.argv[2]))
    join = DECODER.decode(link.recv_bytes())
    assert isinstance(join, Join)
    if sys.argv[1].isdecimal():
        sys.exit(int(sys.argv[1]))
    notes = Path(sys.argv[1]) / str(join.rank)
    lines = [f"{join.instance} {join.config.worker.tensor_parallel} {join.meeting}"]
    while True:
        try:
            message = DECODER.decode(link.recv_bytes())
        except EOFError:
            break
        lines.append(f"{type(message).__name__} {getattr(message, 'step', '')}".strip())
    notes.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
