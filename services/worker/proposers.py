"""Who proposes drafts: the row's own past, a smaller model, or the model's head for multi-token prediction.

Each is called when a step's tokens are in the rows, and puts drafts behind each row's newest token. Models propose what
is likeliest: a draft need not be drawn to be held against a draw (docs/adr/0030-speculative-decoding.md). They have
keys and values of their own in the same blocks as the model's. Those of drafts that do not hold are written again, and
those beyond a row's blocks go to the last block, which is nobody's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.block_tables import BlockTables
from services.worker.drafts import Drafts, Seen
from services.worker.kernels.ops.argmax import argmax
from services.worker.kernels.ops.paged_attention import AttentionRows
from services.worker.kernels.ops.propose_ngram import propose_ngram
from services.worker.kernels.registry import Bindings
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import KvCache
from services.worker.layers.latent_attention import most_captured
from services.worker.layers.rope import RopeTable
from services.worker.state import Rows


def ngram_drafts(bindings: Bindings, shortest: int, longest: int) -> Drafts:
    run = bindings(propose_ngram)

    def propose(rows: Rows, seen: Seen) -> None:
        drafts, drawn = rows.drafts, seen.drawn
        assert drafts is not None
        run(rows.tokens, drafts.drafted, drafts.lengths, drawn.slots, drawn.offsets, drafts.most, shortest, longest)

    return Drafts(bindings, propose)


class Ahead(NamedTuple):
    """One token of each row, at the same distance from its newest one."""

    positions: Tensor  # int64 [B]
    kv_slots: Tensor  # int64 [B]
    attention: AttentionRows


def ahead(rows: Rows, group: BlockTables, begins: Tensor, distance: int, last: int) -> Ahead:
    """The place `distance` behind the newest token of the rows of `begins` (Seen.begins), in a group with pages.

    What is beyond a row's blocks goes to block `last`.
    """
    assert rows.drafts is not None
    slots, room = begins[1], begins[2]
    tables = torch.from_numpy(group.tables) if group.resident is None else group.resident
    positions = (rows.drafts.lengths[slots] - 1 + distance).clamp(0, rows.max_len - 1)
    blocks = tables[slots, positions // rows.block_tokens].long()
    blocks = torch.where(positions < room, blocks, last)
    attention = AttentionRows(
        query_starts=torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device),
        context_lens=(positions + 1).to(torch.int32),
        block_tables=tables,
        block_tokens=rows.block_tokens,
        max_query=1,
        max_context=rows.max_len,
        num_decode=len(slots),
        table_rows=slots.to(torch.int32),
    )
    return Ahead(positions, blocks * rows.block_tokens + positions % rows.block_tokens, attention)


def put(rows: Rows, slots: Tensor, place: int, tokens: Tensor) -> None:
    """tokens: int32 [B]; they become draft number `place` of these rows."""
    assert rows.drafts is not None
    rows.tokens[slots, rows.drafts.lengths[slots] + place] = tokens
    rows.drafts.drafted.index_fill_(0, slots, place + 1)


def model_drafts(bindings: Bindings, model: Decoder, cache: KvCache, rope: RopeTable) -> Drafts:
    """By a smaller model, which sees each step's tokens, and then its own drafts."""
    likeliest, last = bindings(argmax), cache.num_blocks - 1

    def propose(rows: Rows, seen: Seen) -> None:
        assert rows.drafts is not None and seen.computed is not None
        step = seen.computed
        model(seen.drawn.ids, rope.at(step.positions), *step.groups[0], cache, seen.begins[0])
        slots = seen.begins[1]
        for place in range(rows.drafts.most if len(slots) else 0):
            at = ahead(rows, rows.first, seen.begins, place, last)
            ids = rows.tokens[slots, rows.drafts.lengths[slots] - 1 + place]
            x = model(ids, rope.at(at.positions), at.kv_slots, at.attention, cache, None)
            put(rows, slots, place, likeliest(model.logits(x)))

    most_chunk = most_captured(model.spec.latent) if model.compiles else -1
    return Drafts(bindings, propose, reads=True, caches=(cache,), most_chunk=most_chunk)


def mtp_drafts(bindings: Bindings, model: Decoder, cache: KvCache, rope: RopeTable) -> Drafts:
    """By the model's head, which sees each step's hidden states with the tokens after them, and then its own."""
    head, layer, number = model.mtp, cache.layers[-1], cache.groups[-1]
    assert head is not None
    likeliest = bindings(argmax)

    def propose(rows: Rows, seen: Seen) -> None:
        assert rows.drafts is not None and seen.computed is not None
        step, group = seen.computed, (rows.first, *rows.beside)[number]
        last = cache.blocks_of(group.group.pool) - 1
        ids = rows.tokens.view(-1).index_select(0, step.places + 1)
        hidden = head.trunk(step.hidden)
        hidden = head(ids, hidden, rope.at(step.positions), layer, *step.groups[number])
        token, slots, _ = seen.begins
        if not len(slots):
            return
        hidden = hidden.index_select(0, token + rows.drafts.held[slots])
        put(rows, slots, 0, likeliest(head.logits(hidden)))
        for place in range(1, rows.drafts.most):
            at = ahead(rows, group, seen.begins, place - 1, last)
            ids = rows.tokens[slots, rows.drafts.lengths[slots] - 1 + place]
            hidden = head(ids, hidden, rope.at(at.positions), layer, at.kv_slots, at.attention)
            put(rows, slots, place, likeliest(head.logits(hidden)))

    return Drafts(bindings, propose, reads=True)
