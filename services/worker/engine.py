"""What the worker process needs from an engine. Two exist: the model engine (torch) and the null engine (no torch)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from common.config import Config
from common.logprobs import StepLogprobs
from common.protocol import ModelFacts, Progress, RowFault, StepPlan, StepResult


class Pending(Protocol):
    """A step that was started. Its tokens may still be on the way from the device."""

    def ready(self) -> bool:
        """Whether `tokens` would return without waiting."""
        ...

    def tokens(self) -> bytes:
        """_i32 sampled tokens of the rows with samples == 1, in the plan's order; waits for the device."""
        ...

    def counts(self) -> tuple[bytes, bytes]:
        """StepResult's `counts` and `drafted`; waits for the device."""
        ...

    def logprobs(self) -> StepLogprobs | None:
        """StepResult's; waits for the device."""
        ...

    def settle(self) -> None:
        """Draws what could not be drawn before the step before was known; to be called when that one has been sent."""
        ...

    @property
    def faults(self) -> Sequence[RowFault]:
        """Of rows whose tokens mean nothing for reasons of their own; known with the tokens."""
        ...

    @property
    def failed(self) -> bytes:
        """_i32 places of rows for which there was no memory; known from the start."""
        ...


def result_of(step: int, pending: Pending, device_us: int = 0) -> StepResult:
    """Waits for the device."""
    tokens = pending.tokens()
    counts, drafted = pending.counts()
    told = counts, drafted, list(pending.faults), pending.logprobs()
    return StepResult(step, tokens, device_us, "", pending.failed, *told)


class Engine(Protocol):
    facts: ModelFacts
    max_rows: int

    def execute(self, plan: StepPlan) -> Pending:
        """Applies the plan's differences and starts its step."""
        ...

    def figures(self) -> dict[str, float]:
        """By the names of common/metrics.py; called by another thread at any time."""
        ...

    def profile(self, folder: Path | None) -> None:
        """Its steps shall be recorded into a file in `folder`, or (None) not. Called again and again."""
        ...

    def reset(self) -> None:
        """Forgets all rows: another scheduler has taken over."""
        ...

    def close(self) -> None:
        """After the last step."""
        ...


class MakeEngine(Protocol):
    def __call__(self, config: Config, report: Callable[[Progress], None], instance: int = 0) -> Engine: ...
