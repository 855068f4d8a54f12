"""Streams over and over while processes are killed: the schedule of blows, and the run.

`Run.fire` learns the answers first, undisturbed and twice (another order, other company in each batch): a mode whose
tokens depend on the batch is found there and ends the run, since nothing could be judged in it.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.chaos.asks import Ask, with_stops
from benchmarks.chaos.client import Outcome, run
from benchmarks.chaos.judge import Answer, Blow, answer_of, difference
from benchmarks.chaos.site import Site
from valence.programs import Program

# Exact mode: float32 throughout, so that tokens do not depend on which other rows share a step. No quarantine: here
# the same request meets more deaths of its worker than any that is to blame for them.
NO_QUARANTINE = "scheduler.max_worker_deaths=1000000"
SETTINGS = ("model.dtype=float32", "scheduler.max_rows=64", "kv.blocks=512", NO_QUARANTINE)
READY_WITHIN_S = 300.0
LOOK_S = 0.05
RETRY_S = 0.25  # of a client that was refused
QUIET_S = (1.0, 2.5)  # between all ready and the next blow
OVERLAP_S = (0.1, 3.0)  # between a blow and one that is to come too early


class NotExact(Exception):
    """The same request has two answers without any disturbance."""


def schedule(programs: Sequence[Program], count: int, seed: int) -> list[Blow]:
    """`count` kills as blows: each service in turn, then pairs at random, then blows that come too early; over again.

    A pair counts as two kills. Each round begins with a moment at which nothing is hit, to compare with. A service
    with several processes is hit in one of them, drawn anew each time.
    """
    chance = random.Random(seed)
    services = list(dict.fromkeys(program.service for program in programs))

    def one(service: str) -> Program:
        return chance.choice([program for program in programs if program.service == service])

    blows: list[Blow] = []
    kills = 0
    while kills < count:
        turn = [Blow((), recovering=False), *(Blow((one(service),), recovering=False) for service in services)]
        turn += [Blow(tuple(sorted(chance.sample(list(programs), 2))), recovering=False) for _ in range(2)]
        turn += [Blow((chance.choice(list(programs)),), recovering=early) for early in (False, True, True)]
        for blow in turn:
            if kills < count:
                blows.append(blow)
                kills += len(blow.victims)
    return blows


class Run:
    """State of one run; `tell` is called whenever something changed (for a bar)."""

    def __init__(self, site: Site, asks: Sequence[Ask], streams: int, seed: int) -> None:
        self.site = site
        self.asks, self.streams, self.seed = list(asks), streams, seed
        self.answers: dict[int, Answer] = {}
        self.outcomes: list[Outcome] = []
        self.blows: list[Blow] = []
        self.open = 0
        self.stage = "learning the answers"
        self.tell: Callable[[], None] = lambda: None
        self._striking = True
        self._talked: set[int] = set()  # streams (by id of their outcome) with text since then
        self._since_s = 0.0
        self._thread = ThreadPoolExecutor(1)  # the only one that asks the scheduler

    async def learn(self) -> None:
        """Raises NotExact."""
        first = await self._calm(self.asks, self.seed)
        self.asks = with_stops(self.asks, {number: answer.texts[0] for number, answer in first.items()})
        stopped = [ask for ask in self.asks if "stop" in ask.body]
        self.answers = first | await self._calm(stopped, self.seed + 1)
        again = await self._calm(self.asks, self.seed + 2)
        for number, answer in self.answers.items():
            if again[number] != answer:
                raise NotExact(f"ask {number} has two answers: {difference(answer, again[number])}")

    async def _calm(self, asks: Sequence[Ask], seed: int) -> dict[int, Answer]:
        """Each once, as many at a time as in the run, in an order of this seed. Raises NotExact for any failure."""
        rest = list(asks)
        random.Random(seed).shuffle(rest)
        found: dict[int, Answer] = {}

        async def lane() -> None:
            while rest:
                outcome = await self._one(rest.pop())
                if outcome.end != "ended" or outcome.breach:
                    raise NotExact(f"ask {outcome.ask} failed undisturbed: {outcome}")
                found[outcome.ask] = answer_of(outcome)
                self.tell()

        await asyncio.gather(*(lane() for _ in range(self.streams)))
        return found

    async def fire(self, blows: Sequence[Blow]) -> None:
        """All blows under `streams` streams at a time; afterwards every stream that has begun ends by itself."""
        self._striking = True
        lanes = [asyncio.create_task(self._lane(number)) for number in range(self.streams)]
        try:
            for place, blow in enumerate(blows):
                following = blows[place + 1] if place + 1 < len(blows) else None
                await self._strike(blow, overlapped=following is not None and following.recovering)
        finally:
            self._striking = False
            self.stage = "streams end"
            self.tell()
            await asyncio.gather(*lanes)
        await self.settle()

    async def during(self, action: Callable[[], Awaitable[None]]) -> None:
        """Streams over and over until `action` is through, which begins when all have text; then they end."""
        self._striking = True
        lanes = [asyncio.create_task(self._lane(number)) for number in range(self.streams)]
        try:
            await self._until_streaming()
            await action()
        finally:
            self._striking = False
            await asyncio.gather(*lanes)

    async def settle(self) -> None:
        """Waits until nothing is open or held. Raises TimeoutError."""
        async with asyncio.timeout(READY_WITHIN_S):
            while not await self._in_thread(self._settled):
                await asyncio.sleep(LOOK_S)

    def _settled(self) -> bool:
        status = self.site.status()
        if status is None or status.model is None:
            return False
        load = status.load
        idle = load.running == load.waiting == 0 and load.blocks_free + load.blocks_cached == load.blocks_total
        return idle and all(member.counters.get("open_requests", 0.0) == 0.0 for member in status.members)

    async def _lane(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        while self._striking:
            outcome = await self._one(chance.choice(self.asks))
            self.outcomes.append(outcome)
            self.tell()
            if outcome.end in ("refused", "unreachable"):
                await asyncio.sleep(RETRY_S)

    async def _one(self, ask: Ask) -> Outcome:
        self.open += 1
        try:
            return await run("127.0.0.1", self.site.system.port, ask, self.site.owner, self._note)
        finally:
            self.open -= 1

    async def _note(self, outcome: Outcome) -> None:
        if outcome.arrivals and outcome.arrivals[-1] >= self._since_s:  # a comment is no text
            self._talked.add(id(outcome))

    async def _strike(self, blow: Blow, overlapped: bool) -> None:
        chance = random.Random(f"{self.seed} {len(self.blows)}")
        if not blow.recovering:
            await self._until_streaming()
            await asyncio.sleep(chance.uniform(*QUIET_S))
        self.stage = "killing " + (" and ".join(victim.name for victim in blow.victims) or "nobody")
        self.tell()
        blow.at_s = time.monotonic()
        blow.pids = self.site.kill(blow.victims)
        self.blows.append(blow)
        blow.disturbed = overlapped
        if overlapped:
            await asyncio.sleep(chance.uniform(*OVERLAP_S))
        else:
            await self.until_ready()
        blow.ready_s = time.monotonic()
        if not overlapped:
            for earlier in reversed(self.blows[:-1]):  # what was overlapped is well only now
                if not earlier.disturbed:
                    break
                earlier.ready_s = blow.ready_s
        self.tell()

    async def until_ready(self) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(READY_WITHIN_S):
            while not await self._in_thread(self.site.ready):
                await asyncio.sleep(LOOK_S)

    async def _until_streaming(self) -> None:
        """Most streams have text again: a blow is to meet them in the middle. Raises TimeoutError."""
        self._talked.clear()
        self._since_s = time.monotonic()
        async with asyncio.timeout(READY_WITHIN_S):
            while len(self._talked) < self.streams * 3 // 4:
                await asyncio.sleep(LOOK_S)

    async def _in_thread(self, look: Callable[[], bool]) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._thread, look)
