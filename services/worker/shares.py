"""What of a model each rank of a tensor-parallel group has: pure arithmetic.

Query heads go with their KV heads: a rank has whole KV heads, or one KV head that it shares with other ranks. MLPs and
experts are divided along their inner width, embedding and output head along the vocabulary. Shares need not be equal:
they follow heads, and the blocks in which weights are stored. Called by division.py and the engine.
"""

from dataclasses import replace
from typing import NamedTuple

from services.worker.models.spec import DecoderSpec

UNITS = (256, 128, 64, 32, 16)  # blocks of quantized weights, and what matrix kernels like; the largest that fits
MOST_RANKS = 8
MOST_IMBALANCE = 1.05  # of the largest share of a width to the mean


class Span(NamedTuple):
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    def times(self, factor: int) -> "Span":
        return Span(self.begin * factor, self.end * factor)


class Rank(NamedTuple):
    """Which rank of how many. `unit`: what of an inner width stays together if there is enough for all ranks."""

    rank: int
    ranks: int
    unit: int = 1

    def of(self, count: int, unit: int = 1) -> Span:
        """Of `count` things in units that stay together; shares differ by at most one unit."""
        units = count // unit
        return Span(units * self.rank // self.ranks, units * (self.rank + 1) // self.ranks).times(unit)

    def of_width(self, width: int) -> Span:
        """Of an inner width, in units as large as leave the shares about equal."""
        if self.unit > 1 and width % self.unit == 0 and width // self.unit >= self.ranks:
            return self.of(width, self.unit)
        for unit in UNITS:
            if width % unit == 0 and -(-width // unit // self.ranks) * unit * self.ranks <= MOST_IMBALANCE * width:
                return self.of(width, unit)
        return self.of(width)


class Heads(NamedTuple):
    """Of one rank. Query heads are those of its KV heads, which other ranks may have, too."""

    query: Span
    kv: Span


def heads_of(rank: Rank, num_heads: int, num_kv_heads: int) -> Heads:
    """Raises ValueError where ranks and heads do not go together."""
    group = num_heads // num_kv_heads
    if rank.ranks <= num_kv_heads:
        kv = rank.of(num_kv_heads)
        return Heads(kv.times(group), kv)
    per_head, rest = divmod(rank.ranks, num_kv_heads)
    if rest or group < per_head:
        allowed = [n for n in range(2, min(num_heads, MOST_RANKS) + 1) if n <= num_kv_heads or not n % num_kv_heads]
        raise ValueError(
            f"{num_heads} query heads that share {num_kv_heads} KV heads cannot be divided among {rank.ranks} ranks; "
            f"worker.tensor_parallel may be {', '.join(map(str, [1, *allowed]))} for this model"
        )
    head, place = divmod(rank.rank, per_head)
    within = Rank(place, per_head).of(group)
    return Heads(Span(head * group + within.begin, head * group + within.end), Span(head, head + 1))


def local_spec(spec: DecoderSpec, rank: Rank) -> DecoderSpec:
    """What one rank computes; its vocabulary is the whole one, since all ranks get whole logits. Raises ValueError."""
    heads = heads_of(rank, spec.num_heads, spec.num_kv_heads)
    moe = spec.moe
    if (least := min(spec.vocab_size, spec.intermediate_size, moe.inner if moe else spec.vocab_size)) < rank.ranks:
        raise ValueError(f"a vocabulary or an MLP of {least} cannot be divided among {rank.ranks} ranks")
    in_windows = heads_of(rank, spec.num_heads, spec.window_kv_heads or spec.num_kv_heads)
    if in_windows.query != heads.query:
        raise ValueError(f"layers with a window and others have other query heads on one of {rank.ranks} ranks")
    delta = spec.delta
    if delta is not None and delta.heads < rank.ranks:
        raise ValueError(f"{delta.heads} key heads of gated DeltaNet cannot be divided among {rank.ranks} ranks")
    return replace(
        spec,
        delta=replace(delta, heads=rank.of(delta.heads).size) if delta else None,
        num_heads=heads.query.size,
        num_kv_heads=heads.kv.size,
        window_kv_heads=in_windows.kv.size if spec.window_kv_heads else 0,
        intermediate_size=rank.of_width(spec.intermediate_size).size,
        moe=replace(moe, inner=rank.of_width(moe.inner).size, shared_inner=rank.of_width(moe.shared_inner).size)
        if moe
        else None,
    )
