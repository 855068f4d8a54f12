"""What the core is told and what it asks for, as far as these are not wire messages.

Wire messages (Admit, Stop, Abort, Pause, StepResult, WorkerReady) are events as they are. The process shell turns
sockets into events and effects into sends, and does nothing else.
"""

import msgspec

from common.protocol import Abort, Admit, Pause, Refused, StepPlan, StepResult, Stop, TokenBatch, WorkerReady


class WorkerLost(msgspec.Struct, frozen=True, gc=False):
    """The worker process has gone with all its rows and KV. Rows wait for the next WorkerReady."""

    reason: str = ""


class TokenizerLost(msgspec.Struct, frozen=True, gc=False):
    """A tokenizer process has gone: its sequences run on for a while, for another one to take them over."""

    instance: int


class ApiLost(msgspec.Struct, frozen=True, gc=False):
    """An API process has gone: its sequences are aborted."""

    instance: int


class Drain(msgspec.Struct, frozen=True, gc=False):
    """Refuse new requests and finish the open ones."""


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed and nothing else happened."""


class SendPlan(msgspec.Struct, frozen=True, gc=False):
    """To every rank of the worker group, in order."""

    plan: StepPlan


class SendTokens(msgspec.Struct, frozen=True, gc=False):
    """To one tokenizer instance. The instance may have gone: then the batch is for nobody."""

    tokenizer: int
    batch: TokenBatch


class SendRefused(msgspec.Struct, frozen=True, gc=False):
    """To one tokenizer instance: the only answer to this Admit."""

    tokenizer: int
    refused: Refused


class WorkerFault(msgspec.Struct, frozen=True, gc=False):
    """The worker broke the protocol. The core treats it as lost; the shell must replace it."""

    reason: str


Event = Admit | Stop | Abort | Pause | StepResult | WorkerReady | WorkerLost | TokenizerLost | ApiLost | Drain | Tick
Effect = SendPlan | SendTokens | SendRefused | WorkerFault
