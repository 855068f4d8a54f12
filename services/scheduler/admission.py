"""Turns an Admit into sequences, or says why not. Pure: the core enqueues what comes back."""

import numpy as np

from common.errors import Reject, RejectReason
from common.protocol import Admit, Sampling
from services.scheduler.blocks import TOKEN_BYTES, chain_root
from services.scheduler.policy import length_limit
from services.scheduler.request import Request, Sequence
from services.scheduler.state import State, Worker


def sequences_of(state: State, admit: Admit) -> list[Sequence]:
    """The n sequences of a request, in the order of their choices. Raises Reject."""
    worker = state.worker
    if state.draining:
        raise Reject(RejectReason.UNAVAILABLE, "the server is shutting down")
    if worker is None:
        raise Reject(RejectReason.UNAVAILABLE, "no worker has been ready yet")
    _validate(admit, worker)
    waiting = len(state.waiting)
    if waiting + admit.n > state.limits.max_waiting:
        raise Reject(RejectReason.OVERLOADED, f"{waiting} of {state.limits.max_waiting} places in the queue are taken")
    num_prompt = len(admit.tokens) // TOKEN_BYTES
    request = Request(admit.tokens, num_prompt, chain_root(admit.cache_salt, state.hash_seed))
    limit = length_limit(num_prompt, admit.sampling.max_tokens, worker.longest)
    for choice in range(admit.n):
        sequence = Sequence(
            seq_id=admit.seq_id + choice,
            request=request,
            sampling=_sampling_of(admit.sampling, choice),
            key=(admit.priority, state.arrivals + choice),
            limit=limit,
            tokens=bytearray(admit.tokens),
        )
        sequence.note(state.now_s, f"admitted with {num_prompt} tokens as choice {choice} of {admit.n}")
        request.choices.append(sequence)
    return list(request.choices)


def _sampling_of(sampling: Sampling, choice: int) -> Sampling:
    """Choice i draws with seed + i, so that choices differ and can be repeated one by one."""
    if choice == 0:
        return sampling
    values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    values["seed"] = (sampling.seed + choice) % 2**64
    return Sampling(**values)


def _validate(admit: Admit, worker: Worker) -> None:
    facts = worker.facts
    if admit.n < 1:
        raise Reject(RejectReason.INVALID, f"n must be at least 1, not {admit.n}", "n")
    if admit.sampling.max_tokens < 1:
        raise Reject(
            RejectReason.INVALID, f"max_tokens must be at least 1, not {admit.sampling.max_tokens}", "max_tokens"
        )
    num_bytes = len(admit.tokens)
    if num_bytes == 0:
        raise Reject(RejectReason.INVALID, "the prompt is empty", "prompt")
    if num_bytes % TOKEN_BYTES:
        raise Reject(RejectReason.INVALID, f"{num_bytes} bytes are no column of tokens", "prompt")
    num_prompt = num_bytes // TOKEN_BYTES
    if num_prompt >= worker.longest:
        raise Reject(
            RejectReason.TOO_LONG,
            f"the prompt has {num_prompt} tokens; prompt and output together may have {worker.longest} "
            f"(model: {facts.max_model_len}, KV blocks: {facts.num_blocks} of {facts.block_tokens} tokens)",
            "prompt",
        )
    largest = int(np.frombuffer(admit.tokens, np.uint32).max())
    if largest >= facts.vocab_size:
        tokens = np.frombuffer(admit.tokens, np.int32).tolist()
        outside = next(token for token in tokens if not 0 <= token < facts.vocab_size)
        raise Reject(RejectReason.INVALID, f"token {outside} is outside the vocabulary of {facts.vocab_size}", "prompt")
