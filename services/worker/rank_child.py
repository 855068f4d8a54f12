"""`python -m services.worker.rank_child FD PARENT`: one of a group's ranks but the first. Started by ranks.py.

Reads messages from the socket FD: what it is (`Join`), then every plan that rank 0 runs, in its order. It runs them and
answers nobody: rank 0 has the same tokens. It ends when the socket does, or with rank 0, by the kernel.
"""

import ctypes
import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection

import msgspec

from common import log
from common.errors import ConfigError
from common.lifecycle import end_on_config
from common.protocol import StepPlan
from services.worker.engine import Engine
from services.worker.ranks import FromLeader, Join, engine_at

PR_SET_PDEATHSIG = 1


def follow(engine: Engine, link: Connection) -> None:
    """Until the socket ends."""
    decoder = msgspec.msgpack.Decoder(FromLeader)
    while True:
        try:
            message = decoder.decode(link.recv_bytes())
        except EOFError:
            return
        if isinstance(message, StepPlan):
            engine.execute(message).settle()
        else:
            engine.reset()


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    link = Connection(int(sys.argv[1]))
    os.set_inheritable(link.fileno(), False)
    if os.getppid() != int(sys.argv[2]):
        sys.exit("rank 0 is gone")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 has been told, too; the steps that it finishes need all ranks
    faulthandler.enable()
    join = msgspec.msgpack.decode(link.recv_bytes(), type=Join)
    log.set_up(f"worker-{join.instance}.{join.rank}", join.config.log.level, join.config.log.format)
    try:
        engine = engine_at(join, lambda progress: None)
        follow(engine, link)
        engine.close()
    except ConfigError as error:
        end_on_config(error)
    os._exit(0)  # no library's clean-up


if __name__ == "__main__":
    main()
