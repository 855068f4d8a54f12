"""Ranks of one group, forked from a process that has imported torch: most of a start is that."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

T = TypeVar("T")


def said_by(ranks: int, be: Callable[[int], T]) -> list[T]:
    """By rank what `be` returns there. Raises EOFError when one has failed."""
    context, heard, started = multiprocessing.get_context("fork"), [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_told, args=(theirs, rank, be), daemon=True)
        process.start()
        started.append(process)
        theirs.close()
        heard.append(ours)
    said = [each.recv() for each in heard]
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * ranks
    return said


def _told(told: Connection, rank: int, be: Callable[[int], T]) -> None:
    torch.set_num_threads(1)
    told.send(be(rank))
