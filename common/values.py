"""Values inside messages that need no other ones. common/protocol.py has the messages; import from there.

Structs travel as msgpack arrays and grow only by fields appended with defaults. `_i32` in a comment: a packed column.
"""

from typing import Literal

import msgspec

from common.pooling import Embedding

ServiceName = Literal["api", "tokenizer", "scheduler", "worker", "admin"]
State = Literal["starting", "ready", "draining", "failed"]


class Struct(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A value inside a message."""


class KvGroup(Struct, frozen=True):
    """Layers whose cache lives and dies together: one block table per row. All that a scheduler knows of a model.

    full: a block holds what `block_tokens` tokens leave (keys and values, MLA's latent, an indexer's keys); all stay.
    window: the same, but only blocks with some of the last `window` tokens are kept.
    state: a block holds what all tokens so far leave. A row has one, which its steps change; a checkpoint is a copy of
    it, made where `every` divides the number of tokens, and found by their digest like a block of the other kinds.
    """

    kind: Literal["full", "window", "state"]
    pool: int = 0  # groups of one pool have blocks of equal size, and share their numbers
    window: int = 0  # tokens that a token sees, itself included
    every: int = 0  # tokens from checkpoint to checkpoint, a multiple of block_tokens; no chunk of a row crosses one


class ModelFacts(Struct, frozen=True):
    """What the worker found out about the model; everybody else learns it from here."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    eos_token_ids: tuple[int, ...]
    block_tokens: int
    num_blocks: int
    dtype: str = ""
    ops_hash: str = ""
    kv_dtype: str = ""
    attention_parity: int = 0  # context to which attending costs a token as much as the weights do; 0: not known
    groups: tuple[KvGroup, ...] = ()  # (): one, of all layers, that keeps all blocks
    pools: tuple[int, ...] = ()  # blocks of the pools behind the first one, which has num_blocks
    drafts: int = 0  # tokens that the worker proposes behind a row's newest one, to be verified in one step
    draft_rows: int = 0  # in steps of at most so many rows
    embedding: Embedding = Embedding()


class RowTable(Struct, frozen=True):
    """A row's block table in one group, as it starts. Of a state group: the row's live block, and `first` is 0."""

    first: int  # blocks before the window, which the row does not have
    blocks: bytes  # _i32: entries first, first + 1, ...


class Growth(Struct, frozen=True):
    """Blocks appended to tables of one group, as `grown_slots` and `grown_blocks` of a plan are to the first one's."""

    group: int
    slots: bytes  # _i32, may repeat a slot
    blocks: bytes  # _i32


class Copies(Struct, frozen=True):
    """Copies of one pool, as `copy_source` and `copy_target` of a plan are of the first one's."""

    pool: int
    source: bytes  # _i32 blocks
    target: bytes  # _i32 blocks, none of which is a source


class Load(Struct, frozen=True):
    """Scheduler gauges for people, metrics and routers."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0  # free of users but holding a reusable prefix; not counted in blocks_free
    steps: int = 0
    tokens_in_flight: int = 0
    waiting_tokens: int = 0  # prompt tokens of the sequences without
    wait_s: float = 0.0  # how long a new one would wait, as the queue is moving now


class Progress(Struct, frozen=True):
    """Start-up or other long work, for bars: `done` of `total` (total 0: unknown)."""

    stage: str
    done: int = 0
    total: int = 0


class Peer(Struct, frozen=True):
    """One running process. `incarnation` is random per process start and names the sender of every frame."""

    service: ServiceName
    instance: int
    incarnation: int
    endpoint: str
    pid: int = 0
    since_s: float = 0.0  # Unix time of the process start


class Tally(Struct, frozen=True):
    """What the processes have counted that once were one service's instance (common/ledger.py)."""

    gone: tuple[int, ...]  # incarnations that are counted here, newest last
    counters: dict[str, float]
    histograms: dict[str, bytes]


class Member(Struct, frozen=True):
    """A peer as the scheduler sees it."""

    peer: Peer
    state: State
    progress: int = 0  # grows while work gets done
    stage: Progress | None = None
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    histograms: dict[str, bytes] = msgspec.field(default_factory=dict)
