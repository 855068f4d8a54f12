"""Sequences whose tokenizer has died: they run on, and another tokenizer takes them over with all their output.

Called by the core. Whoever takes a sequence over gives it a new id, which says where its tokens go from then on.
Invariant: the tokens of a takeover and those that follow it have no gap, also while plans are in flight.
"""

from common.columns import pack_i32, pack_u64
from common.logprobs import TokenLogprobs
from common.protocol import Admit, FinishReason, TokenBatch, tokenizer_of
from services.scheduler.admission import of_one_api
from services.scheduler.blocks import TOKEN_BYTES
from services.scheduler.state import State

COUNTERS = 1 << 32  # ids of one API process, which begin anew then


def orphan(state: State, tokenizer: int) -> None:
    """The tokenizer of this instance has gone."""
    for sequence in state.sequences.values():
        if tokenizer_of(sequence.seq_id) == tokenizer:
            sequence.orphaned_s = state.now_s
            sequence.note(state.now_s, f"tokenizer-{tokenizer} has gone")


def give_up(state: State, recover_s: float) -> None:
    """Ends those that nobody has taken over for `recover_s`. Without a worker nobody can: that time does not count."""
    for sequence in list(state.sequences.values()):
        if not state.ready and sequence.orphaned_s < state.now_s:
            sequence.orphaned_s = state.now_s
        elif state.now_s - sequence.orphaned_s > recover_s:
            state.finish(sequence, FinishReason.ABORT, message="no tokenizer took it over")


def outdated(state: State, admit: Admit) -> bool:
    """Whether a known sequence runs, or ended, under this id or a younger one."""
    name = state.past.name(admit.origin)
    age = admit.seq_id - name & COUNTERS - 1
    return (name in state.sequences or name in state.past) and not 0 < age < COUNTERS // 2


def take_over(state: State, admit: Admit) -> TokenBatch | None:
    """Goes on with a known sequence under the Admit's id: its output so far, and its end if it has ended.

    None for a sequence that is not known, was given up or belongs to somebody else: to be admitted like any other.
    """
    if not of_one_api(admit.origin, admit.seq_id):
        return None
    sequence = state.sequences.get(state.past.name(admit.origin))
    if sequence is not None:
        state.rename(sequence, admit.seq_id)
        output, finished = bytes(sequence.tokens[len(sequence.request.prompt) :]), []
        records, prompt_records = bytes(sequence.records), bytes(sequence.prompt_records)
        cached = {admit.seq_id: sequence.cached_tokens} if sequence.cached_tokens >= 0 else {}
    else:
        ended = state.past.rename(admit.origin, admit.seq_id)
        if ended is None:
            return None
        output, finished = ended.output, [ended.finished]
        records, prompt_records, cached = ended.records, ended.prompt_records, {}
    count = len(output) // TOKEN_BYTES
    batch = TokenBatch(pack_u64((admit.seq_id,)) * count, pack_i32(range(count)), output, finished, cached=cached)
    if records or prompt_records:
        batch.logprobs[admit.seq_id] = TokenLogprobs(0, records, 1, prompt_records)
    return batch
