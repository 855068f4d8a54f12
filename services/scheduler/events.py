"""What core and fleet are told and what they ask for, as far as these are not wire messages.

Wire messages (Admit, Stop, Abort, Pause, StepResult, WorkerReady) are events as they are; the fleet is told by Group...
whose they are. A group's number is that of one life of it: what comes late from a dead one is nobody's. The process
shell turns sockets into events and effects into sends, and does nothing else.
"""

import msgspec

from common.protocol import (
    Abort,
    Admit,
    ModelFacts,
    Pause,
    Refused,
    StepPlan,
    StepResult,
    Stop,
    TokenBatch,
    WorkerReady,
)


class WorkerLost(msgspec.Struct, frozen=True, gc=False):
    """The worker process has gone with all its rows and KV. Rows wait for the next WorkerReady.

    `died` is False for one that has left on purpose.
    """

    reason: str = ""
    died: bool = True


class GroupReady(msgspec.Struct, frozen=True, gc=False):
    """A worker group can run plans and holds no rows."""

    group: int
    ready: WorkerReady


class GroupResult(msgspec.Struct, frozen=True, gc=False):
    group: int
    result: StepResult


class GroupLost(msgspec.Struct, frozen=True, gc=False):
    """A worker group has gone with all its rows and KV. `died` as in WorkerLost."""

    group: int
    reason: str = ""
    died: bool = True


class TokenizerLost(msgspec.Struct, frozen=True, gc=False):
    """A tokenizer process has gone: its sequences run on for a while, for another one to take them over."""

    instance: int


class ApiLost(msgspec.Struct, frozen=True, gc=False):
    """An API process has gone: its sequences are aborted."""

    instance: int


class Drain(msgspec.Struct, frozen=True, gc=False):
    """Refuse new requests and finish the open ones."""


class Flush(msgspec.Struct, frozen=True, gc=False):
    """Nobody shall find a prefix of before; who has one keeps it."""


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed and nothing else happened."""


class SendPlan(msgspec.Struct, frozen=True, gc=False):
    """To every rank of the worker group, in order. Only the fleet knows the group."""

    plan: StepPlan
    group: int = -1


class SendTokens(msgspec.Struct, frozen=True, gc=False):
    """To one tokenizer instance. The instance may have gone: then the batch is for nobody."""

    tokenizer: int
    batch: TokenBatch


class SendRefused(msgspec.Struct, frozen=True, gc=False):
    """To one tokenizer instance: the only answer to this Admit."""

    tokenizer: int
    refused: Refused


class WorkerFault(msgspec.Struct, frozen=True, gc=False):
    """The worker broke the protocol, or a step's deadline. The core treats it as lost; the shell must replace it."""

    reason: str
    group: int = -1  # only the fleet knows it


class GroupJoined(msgspec.Struct, frozen=True, gc=False):
    """The fleet plans for this group from now on."""

    group: int
    model: ModelFacts


class GroupRefused(msgspec.Struct, frozen=True, gc=False):
    """The fleet does not use this group, now at least; it may ask again."""

    group: int
    reason: str


Event = (
    Admit
    | Stop
    | Abort
    | Pause
    | StepResult
    | WorkerReady
    | WorkerLost
    | TokenizerLost
    | ApiLost
    | Drain
    | Flush
    | Tick
)
FleetEvent = (
    Admit | Stop | Abort | Pause | GroupReady | GroupResult | GroupLost | TokenizerLost | ApiLost | Drain | Flush | Tick
)
Effect = SendPlan | SendTokens | SendRefused | WorkerFault | GroupJoined | GroupRefused
