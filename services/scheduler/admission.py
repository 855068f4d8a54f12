"""Turns an Admit into sequences, or says why not. The core enqueues what comes back; the tenant counts it already."""

import numpy as np

from common.errors import Reject, RejectReason
from common.logprobs import Report, record_bytes
from common.metrics import series
from common.pooling import Pooling
from common.protocol import Admit, Sampling
from common.trace_context import span_id_of
from services.scheduler import policy
from services.scheduler.blocks import TOKEN_BYTES, chain_root
from services.scheduler.policy import I32_MAX, length_limit
from services.scheduler.request import NEVER, Request, Sequence
from services.scheduler.state import State, Worker

# What the samplers can compute with; the API allows less. Field, smallest, largest.
RANGES = (
    ("temperature", 0.0, 1e6),
    ("top_p", 1e-30, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("repetition_penalty", 1e-9, 1e6),
    ("top_k", -1, I32_MAX),
    ("min_tokens", 0, I32_MAX),
)
MOST_TOP = 1024  # log-probabilities of a token
MOST_BIAS = 1e6
ROUTE = 0xFF << 48 | 0xFFFFFFFF  # the bits of an id that a takeover may change: tokenizer and counter


def of_one_api(first: int, second: int) -> bool:
    """Whether two ids were made by the same API process."""
    return not (first ^ second) & ~ROUTE


def sequences_of(state: State, admit: Admit) -> list[Sequence]:
    """The n sequences of a request, in the order of their choices. Raises Reject.

    Before the first worker is ready nothing is known about the model; then `State.attach` checks what this cannot.
    """
    if state.draining:
        raise Reject(RejectReason.UNAVAILABLE, "the server is shutting down")
    _validate(admit)
    limit = NEVER
    num_prompt = len(admit.tokens) // TOKEN_BYTES
    if state.worker is not None:
        _validate_for(admit, state.worker)
        limit = length_limit(num_prompt, admit.sampling.max_tokens, state.worker.longest)
    # What comes with output or from another tokenizer was accepted before.
    if not (admit.again or admit.output or admit.origin >= 0) and (lack := lack_of_room(state, admit.n, num_prompt)):
        state.counters[series("queue_full", _lacking(state, admit.n))] += 1
        raise Reject(RejectReason.OVERLOADED, lack)
    request = Request(admit.tokens, num_prompt, chain_root(admit.cache_salt, state.hash_seed))
    ageing_s = state.limits.priority_ageing_s
    for choice in range(admit.n):
        sequence = Sequence(
            seq_id=admit.seq_id + choice,
            request=request,
            sampling=_sampling_of(admit.sampling, choice),
            key=policy.key(admit.priority, state.now_s, ageing_s, state.waiting.arrivals + choice),
            limit=limit,
            tokens=bytearray(admit.tokens + admit.output),
            tenant=state.waiting.tenants.open(admit.tenant, admit.weight),
            load=1 if choice else num_prompt,  # the others will share the first one's prompt
            origin=admit.seq_id + choice if admit.origin < 0 else admit.origin,
            journal=state.past.journal,
            admitted_s=state.now_s,
            trace=admit.trace,
            span_id=span_id_of(admit.trace, admit.seq_id + choice, state.hash_seed) if admit.trace else "",
            records=bytearray(admit.logprobs),
        )
        sequence.note(state.now_s, f"admitted with {sequence.known} tokens as choice {choice} of {admit.n}")
        request.choices.append(sequence)
    return list(request.choices)


def lack_of_room(state: State, n: int, num_prompt: int) -> str:
    """Why the queue takes no such request now; empty if it does.

    It is bounded by sequences and by tokens; a prompt that exceeds the bound alone may wait alone.
    """
    limits, waiting, tokens = state.limits, len(state.waiting), state.waiting.tokens
    if waiting + n > limits.max_waiting:
        return f"{waiting} of {limits.max_waiting} places in the queue are taken"
    most = policy.waiting_tokens(limits.max_waiting_tokens, limits.step_tokens)
    if tokens and tokens + num_prompt + n - 1 > most:
        return f"{tokens} prompt tokens wait already; the queue takes {most}"
    return ""


def _lacking(state: State, n: int) -> str:
    """What `lack_of_room` has found, in the words of vLLM's metrics."""
    return "max_num_queued_reqs" if len(state.waiting) + n > state.limits.max_waiting else "max_num_queued_tokens"


def _sampling_of(sampling: Sampling, choice: int) -> Sampling:
    """Choice i draws with seed + i, so that choices differ and can be repeated one by one."""
    if choice == 0:
        return sampling
    values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    values["seed"] = (sampling.seed + choice) % 2**64
    values["report"] = Report(sampling.report.top, named=sampling.report.named)  # the first one tells of the prompt
    return Sampling(**values)


def _validate(admit: Admit) -> None:
    """What can be said without knowing the model."""
    if admit.n < 1:
        raise Reject(RejectReason.INVALID, f"n must be at least 1, not {admit.n}", "n")
    if (admit.output or admit.origin >= 0) and admit.n != 1:
        raise Reject(RejectReason.INVALID, "choices that were admitted before are admitted one by one", "n")
    if admit.origin >= 0 and not of_one_api(admit.origin, admit.seq_id):
        raise Reject(RejectReason.INVALID, "the sequence belongs to another API process", "origin")
    pooling = admit.sampling.report.pooling
    if pooling is not None:
        _validate_pooled(admit, pooling)
    elif admit.sampling.max_tokens < 1:
        text = f"max_tokens must be at least 1, not {admit.sampling.max_tokens}"
        raise Reject(RejectReason.INVALID, text, "max_tokens")
    _validate_sampling(admit.sampling)
    if not admit.tokens:
        raise Reject(RejectReason.INVALID, "the prompt is empty", "prompt")
    for column in (admit.tokens, admit.output):
        if len(column) % TOKEN_BYTES:
            raise Reject(RejectReason.INVALID, f"{len(column)} bytes are no column of tokens", "prompt")
    report = admit.sampling.report
    if not (-1 <= report.top <= MOST_TOP and -1 <= report.prompt <= MOST_TOP):
        raise Reject(RejectReason.INVALID, f"{report} is not between -1 and {MOST_TOP}", "logprobs")
    if report.named and len(report.named) != report.top:
        text = f"{len(report.named)} named tokens do not come as {report.top} log-probabilities"
        raise Reject(RejectReason.INVALID, text, "logprob_token_ids")
    if len(admit.logprobs) != record_bytes(report.top) * (len(admit.output) // TOKEN_BYTES):
        raise Reject(RejectReason.INVALID, f"{len(admit.logprobs)} bytes are no records of the output", "logprobs")


def _validate_pooled(admit: Admit, pooling: Pooling) -> None:
    """A vector comes alone."""
    sampling = admit.sampling
    if sampling.max_tokens or admit.output or admit.n != 1 or sampling.report.asks or sampling.grammar is not None:
        raise Reject(RejectReason.INVALID, "a prompt that is pooled has one vector and no output", "pooling")
    if pooling.dimensions < 0:
        raise Reject(RejectReason.INVALID, f"no vector has {pooling.dimensions} dimensions", "dimensions")


def _validate_sampling(sampling: Sampling) -> None:
    """A number that is none, or that no worker can hold, would end the worker and not its request."""
    for name, least, most in RANGES:
        if not least <= getattr(sampling, name) <= most:
            text = f"{name} is {getattr(sampling, name)}, not between {least:g} and {most:g}"
            raise Reject(RejectReason.INVALID, text, name)
    for token, bias in sampling.logit_bias:
        if not -MOST_BIAS <= bias <= MOST_BIAS:
            text = f"the bias of token {token} is {bias}, not between {-MOST_BIAS:g} and {MOST_BIAS:g}"
            raise Reject(RejectReason.INVALID, text, "logit_bias")


def _validate_for(admit: Admit, worker: Worker) -> None:
    """Whether this worker can ever run it."""
    facts = worker.facts
    num_prompt = len(admit.tokens) // TOKEN_BYTES
    pooling = admit.sampling.report.pooling
    if pooling is not None and not policy.can_pool(pooling, facts.embedding):
        text = f"the model gives no vectors of {pooling.dimensions or 'any'} dimensions; {facts.embedding.lacks}"
        raise Reject(RejectReason.INVALID, text.rstrip("; "), "dimensions" if facts.embedding.size else "model")
    if num_prompt >= worker.longest + (pooling is not None):
        raise Reject(
            RejectReason.TOO_LONG,
            f"the prompt has {num_prompt} tokens; prompt and output together may have {worker.longest} "
            f"(model: {facts.max_model_len}, KV blocks: {facts.num_blocks} of {facts.block_tokens} tokens)",
            "prompt",
        )
    tokens = np.frombuffer(admit.tokens + admit.output, np.uint32)
    if int(tokens.max()) >= facts.vocab_size:
        outside = next(token for token in tokens.view(np.int32).tolist() if not 0 <= token < facts.vocab_size)
        raise Reject(RejectReason.INVALID, f"token {outside} is outside the vocabulary of {facts.vocab_size}", "prompt")
    for named in admit.sampling.report.named:
        if not 0 <= named < facts.vocab_size:
            text = f"token {named} is outside the vocabulary of {facts.vocab_size}"
            raise Reject(RejectReason.INVALID, text, "logprob_token_ids")
