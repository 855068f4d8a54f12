"""What a group's state offers to a sequence, as numbers for the router. Reads states; called by the fleet only."""

import msgspec

from common.protocol import FinishReason, Load
from services.scheduler.blocks import TOKEN_BYTES
from services.scheduler.request import Sequence
from services.scheduler.router import Place, expected_output
from services.scheduler.state import State


def filling_tokens(state: State) -> int:
    """Known tokens of sequences with rows that no issued plan computes."""
    return sum(row.sequence.known - row.scheduled for row in state.filling)


def of_tokens(state: State, tokens: bytes | bytearray, wanted: int, root: bytes, chain: list[bytes]) -> Place:
    """For a sequence with these known tokens, at the end of this group's queue.

    `wanted`: tokens that it is sure to have place for if the group can hold them. `chain` as for BlockPool.match, so
    that the tokens are hashed once for all groups.
    """
    worker = state.worker
    assert worker is not None
    kv, known = worker.kv, len(tokens) // TOKEN_BYTES
    hit = (
        kv.prefixes.match(tokens, (known - 1) // kv.block_tokens, root, chain)
        if state.prefix_cache
        else kv.prefixes.nothing
    )
    return Place(
        uncached=known - hit.num_blocks * kv.block_tokens,
        pending=state.waiting.tokens + filling_tokens(state),
        open=len(state.sequences),
        missing=kv.missing_tokens(hit, known),
        short=max(min(wanted, worker.facts.max_model_len) - worker.longest, 0),
    )


def of_sequence(state: State, sequence: Sequence) -> Place:
    """For a sequence of another group."""
    wanted = sequence.known + expected_output(sequence.sampling.max_tokens, sequence.num_output)
    return of_tokens(state, sequence.tokens, wanted, sequence.request.root, sequence.chain)


def of_next(state: State, sequence: Sequence) -> Place:
    """For a sequence of this group's queue as the next to get a row; without a free one, one must end first."""
    worker = state.worker
    assert worker is not None
    place = of_sequence(state, sequence)
    rows = worker.slots.max_rows - worker.slots.free
    return place._replace(pending=filling_tokens(state), open=rows + (worker.slots.free == 0))


def room(state: State) -> int:
    """Rows for sequences of other groups: none while its own have work to begin with."""
    worker = state.worker
    assert worker is not None
    return 0 if state.waiting or state.filling else worker.slots.free


def lend_chain(state: State, seq_id: int, root: bytes, chain: list[bytes]) -> None:
    """The first choice of a request need not hash its prompt again."""
    sequence = state.sequences.get(seq_id)
    if sequence is not None and sequence.row is None and not sequence.chain and sequence.request.root == root:
        sequence.chain = chain


def end_begun(state: State, message: str) -> None:
    """Sequences that have output cannot go on with another model."""
    for sequence in list(state.sequences.values()):
        if sequence.num_output:
            state.finish(sequence, FinishReason.ERROR, message=message)


def together(loads: list[Load], past_steps: int) -> Load:
    """Of several groups: sums, but for the time that a new sequence would wait, which goes where that is least."""
    total = Load(*map(sum, zip(*map(msgspec.structs.astuple, loads), strict=True)))
    return msgspec.structs.replace(
        total, steps=total.steps + past_steps, wait_s=min((load.wait_s for load in loads), default=0.0)
    )
