"""Vectors of prompts that are pooled: which row each is of, checked; each ends its sequence. Called by the results.

A sequence that has lost its row begins anew, so nothing of a vector is kept before it is whole. Of the last token it
may take its prompt's KV from the prefix cache like any other; a mean computes all tokens itself (planner.py).
"""

from common.pooling import vector_bytes
from common.protocol import FinishReason, StepResult
from services.scheduler.request import Row
from services.scheduler.rows import I64
from services.scheduler.state import Fault, Flight, State, Worker


def read(worker: Worker, flight: Flight, result: StepResult, failed: I64 | None) -> list[tuple[Row, bytes]]:
    """Of rows that have not failed. Raises Fault for a vector that is missing, or that nobody asked for."""
    given = result.logprobs.vectors if result.logprobs is not None else {}
    if not flight.pooled and not given:
        return []
    lost = set() if failed is None else set(failed.tolist())
    places = {place: row for place, row in enumerate(flight.filled, flight.num_stepped) if row in flight.pooled}
    if strange := given.keys() - places.keys() or places.keys() - given.keys() - lost:
        raise Fault(f"step {flight.step} gave vectors of rows {sorted(given)}, not those of {sorted(strange)}")
    size = worker.facts.embedding.size
    for place, vector in given.items():
        pooling = places[place].sequence.pooled
        assert pooling is not None, "flight.pooled has only such rows"
        if len(vector) != vector_bytes(pooling, size):
            raise Fault(f"step {flight.step} gave a vector of {len(vector)} bytes, not {vector_bytes(pooling, size)}")
    return [(places[place], vector) for place, vector in given.items() if place not in lost]


def apply(state: State, found: list[tuple[Row, bytes]]) -> None:
    """Rows that have ended meanwhile have their terminal already."""
    for row, vector in found:
        if row.alive:
            state.finish(row.sequence, FinishReason.EOS, vector=vector)
