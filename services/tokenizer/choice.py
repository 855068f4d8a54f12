"""Which scheduler gets a request: by prefix, bounded by load. Pure; called by the lanes.

A prefix belongs to one scheduler, by rendezvous hashing weighted with KV blocks: all tokenizers agree without a word.
The prompt's first 64, 256, 1024, 4096 tokens are looked at, the shortest first, so that requests with one system prompt
stay together. An owner takes it while it has fewer open sequences than `HEADROOM` times the mean plus `SLACK`. From
half the slack over the mean on, each conversation (the longest such prefix) leaves the owners of shorter ones at a
point of its own, so that of a hot prefix always the same conversations go elsewhere. What has no owner, or whose owners
are all full, goes to the emptier of two schedulers that are not above the mean.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

TOKEN_BYTES = 4
LEVELS = (64, 256, 1024, 4096)  # tokens
HEADROOM = 1.25
SLACK = 4.0  # sequences


class Candidate(NamedTuple):
    """A scheduler that takes work."""

    instance: int
    num_open: int  # sequences that it has
    num_blocks: int  # KV blocks of its workers; 0: not known


def choose(tokens: bytes, salt: str, seq_id: int, candidates: Sequence[Candidate]) -> int:
    """The instance for a prompt (_i32 column); `salt` separates prefix caches, `seq_id` is the request's own.

    There is at least one candidate.
    """
    if len(candidates) == 1:
        return candidates[0].instance
    weights = _weights(candidates)
    fills = {each.instance: each.num_open / weights[each.instance] for each in candidates}
    mean = sum(each.num_open for each in candidates) / sum(weights.values())
    soft, bound = mean + SLACK / 2, HEADROOM * mean + SLACK
    keys = _keys(tokens, salt)
    for place, key in enumerate(keys):
        owner = _ranked(key, weights)[0]
        patience = 1.0 if key is keys[-1] else _uniform(keys[-1], place)
        if fills[owner] < soft + (bound - soft) * patience:
            return owner
    low = {instance: weight for instance, weight in weights.items() if fills[instance] <= mean}
    two = _ranked(seq_id.to_bytes(8, "little"), low)[:2]
    return min(two, key=lambda instance: fills[instance])


def _weights(candidates: Sequence[Candidate]) -> dict[int, float]:
    """Shares of the capacity, 1 on average; all equal while one is not known."""
    total = sum(each.num_blocks for each in candidates)
    if not all(each.num_blocks > 0 for each in candidates):
        return {each.instance: 1.0 for each in candidates}
    return {each.instance: each.num_blocks * len(candidates) / total for each in candidates}


def _keys(tokens: bytes, salt: str) -> list[bytes]:
    """Digests of the prompt's prefixes, shortest first."""
    seed = xxhash.xxh3_64_intdigest(salt.encode())
    sizes = [level * TOKEN_BYTES for level in LEVELS]
    return [xxhash.xxh3_64_digest(tokens[:size], seed) for size in sizes if size <= len(tokens)]


def _ranked(key: bytes, weights: dict[int, float]) -> list[int]:
    """Schedulers by their claim on a key, the owner first."""
    return sorted(weights, key=lambda instance: (math.log(_uniform(key, instance)) / weights[instance], instance))[::-1]


def _uniform(key: bytes, number: int) -> float:
    """In (0, 1), the same in every process."""
    return (xxhash.xxh3_64_intdigest(key, number) + 1) / (2**64 + 2)
