"""Client processes of `benchmarks.serve`: each runs its share of the requests and hands the results back by a pipe.

`Clients` owns the processes and is all that the parent uses. A task goes down as one message; progress (a count of
ended streams) and at last the list of results come up. The parent and the clients share the machine's clock.
"""

import asyncio
import gc
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType

import msgspec
import uvloop

from benchmarks.load import StreamResult, run_stream

TELL_S = 0.2
LEAD_S = 0.3  # from sending the tasks to the first request: all clients have theirs by then


class Task(msgspec.Struct):
    """`at_s`: when to open each request, since `start_s`; empty: `concurrency` at a time, as soon as one has ended."""

    requests: list[bytes]
    at_s: list[float]
    concurrency: int
    start_s: float = 0.0


class Client:
    """One process's side."""

    def __init__(self, pipe: Connection, host: str, port: int) -> None:
        self.pipe, self.host, self.port = pipe, host, port
        self._results: list[StreamResult] = []

    async def run(self, task: Task) -> None:
        self._results = []
        teller = asyncio.create_task(self._tell())
        await asyncio.sleep(max(0.0, task.start_s - time.perf_counter()))
        if task.at_s:
            opened = [self._open_at(task.start_s + at_s, r) for at_s, r in zip(task.at_s, task.requests, strict=True)]
            await asyncio.gather(*opened)
        else:
            rest = iter(task.requests)
            await asyncio.gather(*(self._one_by_one(rest) for _ in range(task.concurrency)))
        teller.cancel()
        self.pipe.send_bytes(msgspec.msgpack.encode(self._results))

    async def _open_at(self, at_s: float, request: bytes) -> None:
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        self._results.append(await run_stream(self.host, self.port, request))

    async def _one_by_one(self, rest: Iterator[bytes]) -> None:
        for request in rest:
            self._results.append(await run_stream(self.host, self.port, request))

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            self.pipe.send_bytes(msgspec.msgpack.encode(len(self._results)))


def main(pipe: Connection, host: str, port: int) -> None:
    """A client process: runs tasks until the pipe closes."""
    client = Client(pipe, host, port)
    while True:
        try:
            task = msgspec.msgpack.decode(pipe.recv_bytes(), type=Task)
        except EOFError:
            return
        gc.collect()
        gc.disable()
        uvloop.run(client.run(task))
        gc.enable()


def default_clients() -> int:
    """A quarter of the cores, so that the services have theirs."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 4))


class Clients:
    """`with Clients(host, port, 4) as clients: clients.run(...)`."""

    def __init__(self, host: str, port: int, count: int) -> None:
        self.address = (host, port)
        self._count = count
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> "Clients":
        spawn = multiprocessing.get_context("spawn")
        for _ in range(self._count):
            own, theirs = spawn.Pipe()
            process = spawn.Process(target=main, args=(theirs, *self.address), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(own)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.terminate()

    def run(
        self, requests: list[bytes], concurrency: int, at_s: list[float] | None, tell: Callable[[int], None]
    ) -> list[StreamResult]:
        """Runs all requests, spread over the clients; `tell` gets the number of ended ones now and then.

        Raises RuntimeError if a client process dies.
        """
        # No more clients than streams at a time: each must have a share.
        used = self._pipes[: concurrency if at_s is None else None]
        start_s = time.perf_counter() + LEAD_S
        for place, pipe in enumerate(used):
            share = math.ceil((concurrency - place) / len(used))
            task = Task(requests[place :: len(used)], (at_s or [])[place :: len(used)], share, start_s)
            pipe.send_bytes(msgspec.msgpack.encode(task))
        done, results = dict.fromkeys(used, 0), []
        waiting = set(used)
        while waiting:
            ready = wait(list(waiting))
            for pipe in waiting.intersection(ready):
                try:
                    told = msgspec.msgpack.decode(pipe.recv_bytes(), type=int | list[StreamResult])
                except EOFError as error:
                    raise RuntimeError("a client process of the benchmark died") from error
                if isinstance(told, int):
                    done[pipe] = told
                else:
                    done[pipe] = len(told)
                    results += told
                    waiting.discard(pipe)
                tell(sum(done.values()))
        return results
