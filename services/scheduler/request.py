"""One sequence's life: what it is, where it stands, what happened to it.

Only state.py moves a sequence from stage to stage, along NEXT; every other move is an error that tells the story.
Counts are in tokens: known (prompt and received output), scheduled (positions that issued plans compute). A row is
one stay on the worker; a preempted sequence gets a new row later, and results for a row that is gone are dropped.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from common.pooling import Pooling
from common.protocol import Sampling
from services.scheduler.blocks import TOKEN_BYTES
from services.scheduler.policy import Key
from services.scheduler.tenants import Tenant

STORY_LINES = 64
NEVER = 1 << 62  # a tick or step that does not come


Journal = Callable[[int, str], None]  # hears what happens to a sequence, besides its own log


def silent(seq_id: int, text: str) -> None:
    """Nobody listens."""


class Stage(IntEnum):
    WAITING = 0  # in the queue, holds nothing
    FILLING = 1  # has a row; more than one known token is not scheduled yet
    STEPPING = 2  # has a row in the table; every decode step computes one token
    ENDING = 3  # has a row; all its tokens are scheduled, the last results are on their way
    FINISHED = 4
    PAUSED = 5  # holds nothing and is not in the queue: its client does not read
    DRAFTING = 6  # has a row; a step computes its newest token and drafts behind it (drafting.py)


NEXT: dict[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.FILLING, Stage.FINISHED, Stage.PAUSED}),
    Stage.FILLING: frozenset({Stage.STEPPING, Stage.DRAFTING, Stage.ENDING, Stage.WAITING, Stage.FINISHED}),
    Stage.STEPPING: frozenset({Stage.DRAFTING, Stage.ENDING, Stage.WAITING, Stage.FINISHED}),
    Stage.DRAFTING: frozenset({Stage.STEPPING, Stage.WAITING, Stage.FINISHED}),
    Stage.ENDING: frozenset({Stage.WAITING, Stage.FINISHED}),
    Stage.FINISHED: frozenset(),
    Stage.PAUSED: frozenset({Stage.WAITING, Stage.FINISHED}),
}


class IllegalTransition(Exception):
    """A move that the table does not allow; the text is the sequence's story."""


@dataclass(slots=True, eq=False)
class Request:
    """What the n choices of one Admit share."""

    prompt: bytes  # _i32
    num_prompt: int
    root: bytes  # what its digest chains start from
    choices: "list[Sequence]" = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Table:
    """A row's blocks in one group of layers. A window has given back those before `first`."""

    blocks: list[int]
    first: int = 0

    @property
    def end(self) -> int:
        """Number of the first block that it has not got yet."""
        return self.first + len(self.blocks)


@dataclass(slots=True, eq=False)
class Row:
    """One stay of a sequence on the worker. `alive` until the slot is given back."""

    sequence: "Sequence"
    slot: int
    blocks: list[int]  # of the first group: that of tables[0]
    scheduled: int  # not kept up while STEPPING: then the table's tick tells it; DRAFTING: as if all drafts held
    published: int  # leading blocks that need no publishing any more
    alive: bool = True
    epoch: int = -1  # unique per stay, given by the table
    filled_step: int = NEVER  # step that computes the last known token of the FILLING stage
    position_base: int = 0  # STEPPING: the position computed at tick t is position_base + t
    flushed_tick: int = NEVER  # STEPPING, ENDING: results up to this tick are in sequence.tokens
    last_tick: int = NEVER  # STEPPING, ENDING: tick that computes the last token before the length limit
    tables: list[Table] = field(default_factory=list)  # by group
    saved: list[tuple[int, int, int]] = field(default_factory=list)  # checkpoints nobody finds yet: group, at block, it


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request."""

    seq_id: int
    request: Request
    sampling: Sampling
    key: Key
    limit: int  # prompt and output tokens at which it ends with LENGTH
    tokens: bytearray  # _i32: prompt and received output, except what the table has not flushed yet
    tenant: Tenant
    load: int = 0  # tokens that it weighs in the queue
    stage: Stage = Stage.WAITING
    row: Row | None = None
    chain: list[bytes] = field(default_factory=list)  # digests of its full blocks, as far as computed
    cached_tokens: int = -1  # prompt tokens found in the prefix cache by its first row; -1 before
    worker_deaths: int = 0
    origin: int = -1  # its first id: others follow when tokenizers die
    orphaned_s: float = inf  # since when no tokenizer has it
    admitted_s: float = 0.0
    started_s: float = inf  # first planned; a preemption does not change it
    first_s: float = inf  # first output token received
    preemptions: int = 0
    trace: str = ""  # of whom it is done for; empty: it is not recorded
    span_id: str = ""  # its own, within that
    log: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=STORY_LINES))
    journal: Journal = silent
    records: bytearray = field(default_factory=bytearray)  # of its output tokens, if it wants any (reports.py)
    prompt_records: bytearray = field(default_factory=bytearray)

    @property
    def known(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def pooled(self) -> Pooling | None:
        """How its prompt becomes a vector, which is all that it gives then."""
        return self.sampling.report.pooling

    @property
    def num_output(self) -> int:
        return self.known - self.request.num_prompt

    def note(self, now_s: float, text: str) -> None:
        self.log.append((now_s, text))
        self.journal(self.seq_id, text)

    def story(self) -> list[str]:
        return story_lines(self.seq_id, self.log)

    def move(self, stage: Stage, now_s: float, why: str) -> None:
        """Changes the stage. Raises IllegalTransition with the story."""
        if stage not in NEXT[self.stage]:
            lines = [f"{self.stage.name} -> {stage.name} ({why}) is not allowed", *self.story()]
            raise IllegalTransition("\n".join(lines))
        self.stage = stage
        self.note(now_s, why)


def story_lines(seq_id: int, log: "deque[tuple[float, str]]") -> list[str]:
    """A bounded log as text, oldest first; times in seconds of the core's clock."""
    return [f"{seq_id:#018x}", *(f"{at_s:.6f} {text}" for at_s, text in log)]
