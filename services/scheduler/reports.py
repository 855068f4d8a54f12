"""Log-probabilities that come with a step's tokens: which row each record is of, checked, kept and handed on.

Called by the results. A sequence keeps all its records, since its tokenizer may die with them; who takes it over gets
them again. A prompt's come in pieces before the first token: until they are whole, its row computes what they need
itself and shares no prefix (planner.py). Rows without such wishes cost nothing but a look.
"""

from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple

from common.logprobs import StepLogprobs, TokenLogprobs, record_bytes
from common.protocol import StepResult
from services.scheduler.drafting import Drafted
from services.scheduler.request import Row, Sequence
from services.scheduler.state import Fault, Flight, State, Worker

NONE = StepLogprobs()


class Found(NamedTuple):
    row: Row
    records: bytes = b""
    first_prompt: int = 0
    prompt: bytes = b""


def wished(flight: Flight) -> bool:
    """Whether a row of the step wants any."""
    if flight.roster is not None and flight.roster.tops:
        return True
    return any(row.sequence.sampling.report.asks for row in flight.filled) or any(
        row.sequence.sampling.report.asks for row, _ in flight.drafted
    )


def read(
    worker: Worker, flight: Flight, result: StepResult, drafted: Drafted | None, failed: Collection[int]
) -> list[Found]:
    """What came for living rows. `failed`: places of the plan. Raises Fault for what the plan does not allow."""
    logprobs = result.logprobs or NONE
    if logprobs == NONE and not wished(flight):
        return []
    prompts = {
        part.row: part
        for place, piece in logprobs.prompts.items()
        if place not in failed and (part := _prompt(flight, place, *piece)).row.alive
    }
    for place, filled in enumerate(flight.filled, flight.num_stepped):
        if filled.alive and place not in failed and filled in flight.samplers:
            _check_whole(flight, filled, prompts.get(filled))
    found: list[Found] = []
    end = 0
    for place, row, top, count in _sampled(worker, flight, drafted):
        if place in failed:
            continue
        begin, end = end, end + count * record_bytes(top)
        if row is not None and row.alive:
            told = prompts.pop(row, Found(row))
            found.append(told._replace(records=logprobs.tokens[begin:end]))
    if end != len(logprobs.tokens):
        raise Fault(f"step {flight.step} gave {len(logprobs.tokens)} bytes of log-probabilities, not {end}")
    return found + list(prompts.values())


def _sampled(worker: Worker, flight: Flight, drafted: Drafted | None) -> Iterator[tuple[int, Row | None, int, int]]:
    """Rows that want records, in the order of the tokens: place in the plan, row, `top`, number of tokens."""
    roster = flight.roster
    if roster is not None:
        for place, top in roster.tops:
            row = worker.rows.by_slot[roster.slots[place]]
            yield place, row if row is not None and row.epoch == roster.epochs[place] else None, top, 1
    for place, ((row, _), count) in enumerate(zip(flight.drafted, drafted.counts if drafted else b"", strict=False)):
        if (top := row.sequence.sampling.report.top) >= 0:
            yield place, row, top, count
    for place, row in enumerate(flight.filled, flight.num_stepped):
        if (top := row.sequence.sampling.report.top) >= 0 and row in flight.samplers:
            yield place, row, top, 1


def _prompt(flight: Flight, place: int, first: int, records: bytes) -> Found:
    """The part that the row does not have yet."""
    filled = place - flight.num_stepped
    row = next(islice(flight.filled, filled, None), None) if filled >= 0 else None
    width = record_bytes(row.sequence.sampling.report.prompt) if row is not None else 0
    if row is None or not width:
        raise Fault(f"step {flight.step} gave log-probabilities of a prompt at place {place}, which wants none")
    count, rest = divmod(len(records), width)
    have = scored(row.sequence)
    if rest or not 1 <= first <= first + count <= row.sequence.request.num_prompt or (row.alive and first > have + 1):
        raise Fault(f"step {flight.step} gave {len(records)} bytes of a prompt's log-probabilities from {first} on")
    known = min(max(have + 1 - first, 0), count)
    return Found(row, b"", first + known, records[known * width :])


def _check_whole(flight: Flight, row: Row, told: Found | None) -> None:
    """Before its first token a row has all of its prompt's."""
    missing = unscored(row.sequence)
    if told is not None:
        missing -= len(told.prompt) // record_bytes(row.sequence.sampling.report.prompt)
    if missing:
        raise Fault(f"step {flight.step} drew a token, but {missing} log-probabilities of the prompt are missing")


def apply(state: State, found: list[Found]) -> None:
    """To be called before the step's tokens are received: an end takes the row."""
    for row, records, first_prompt, prompt in found:
        if row.alive:
            sequence = row.sequence
            first = output_records(sequence)
            sequence.records += records
            sequence.prompt_records += prompt
            state.outbox.add_logprobs(sequence.seq_id, TokenLogprobs(first, records, first_prompt, prompt))


def output_records(sequence: Sequence) -> int:
    """Output tokens that have their records."""
    width = record_bytes(sequence.sampling.report.top)
    return len(sequence.records) // width if width else 0


def scored(sequence: Sequence) -> int:
    """Leading positions of the prompt whose next token has its record."""
    width = record_bytes(sequence.sampling.report.prompt)
    return len(sequence.prompt_records) // width if width else 0


def unscored(sequence: Sequence) -> int:
    """Records of the prompt that are still to come."""
    return sequence.request.num_prompt - 1 - scored(sequence) if sequence.sampling.report.prompt >= 0 else 0
