"""A long mixed load with kills: well and badly behaved clients, samples of every process, and the accounts of the KV.

api-0 and tokenizer-0 are never killed, and in the last third of the time only their siblings are: so every service has
a long life whose memory can be judged.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from benchmarks.chaos import rude
from benchmarks.chaos.asks import Ask
from benchmarks.chaos.client import Outcome, run
from benchmarks.chaos.judge import Blow
from benchmarks.chaos.kills import NO_QUARANTINE, RETRY_S, Run
from benchmarks.chaos.site import Site
from valence.programs import Program

SETTINGS = ("model.dtype=float32", "scheduler.max_rows=64", "kv.blocks=256", "model.max_len=2048", NO_QUARANTINE)
# What a client does, and how often.
LOAD = {"stream": 50, "whole": 8, "slow": 8, "leave": 14, "bad input": 12, "no HTTP": 3, "aborted upload": 5}
RUDE = {"bad input": rude.bad_input, "no HTTP": rude.no_http, "aborted upload": rude.aborted_upload}
SLOW_READ_S = 0.15  # between two reads of a slow client
FILES_AT_REST = 96  # descriptors of a process that has no client: libraries, links to its peers, sockets
MIB = 2**20


class Left(Exception):
    """The client goes away."""


class Sample(NamedTuple):
    """One process at one time (seconds since the run began)."""

    program: Program
    pid: int
    at_s: float
    resident_mib: float
    files: int


class Soak(Run):
    """`fire` is replaced by `soak`; outcomes and blows are judged as in any run. `pause_s`: of a client between two."""

    def __init__(self, site: Site, asks: Sequence[Ask], streams: int, seed: int, pause_s: float = 0.0) -> None:
        super().__init__(site, asks, streams, seed)
        self._pause_s = pause_s
        self.samples: list[Sample] = []
        self.did: Counter[str] = Counter()
        self.faults: list[str] = []  # of what is not a stream: answers to bad input, blocks
        self.started_s = 0.0
        self.watched = 0  # looks at the scheduler's load

    async def soak(self, length_s: float, kill_every_s: float, sample_every_s: float) -> None:
        """Load for so long. Raises TimeoutError if the system does not come back after a kill, or does not settle."""
        self.started_s = time.monotonic()
        lanes = [asyncio.create_task(self._lane(number)) for number in range(self.streams)]
        sampler = asyncio.create_task(self._sample(sample_every_s))
        try:
            await self._strike_until(self.started_s + length_s, length_s, kill_every_s)
        finally:
            self._striking = False
            self.stage = "streams end"
            await asyncio.gather(*lanes)
            sampler.cancel()
        await self.settle()
        rest_s = time.monotonic() - self.started_s
        self._look()
        for sample in [sample for sample in self.samples if sample.at_s >= rest_s]:
            if sample.files > FILES_AT_REST:
                self.faults.append(f"{sample.program.name} has {sample.files} files open, and nothing to do")

    async def _strike_until(self, end_s: float, length_s: float, kill_every_s: float) -> None:
        chance = random.Random(self.seed)
        calm_s = self.started_s + length_s * 2 / 3
        for number in range(10**9):
            left_s = end_s - time.monotonic()
            await asyncio.sleep(min(left_s, kill_every_s * chance.uniform(0.7, 1.3)))
            if time.monotonic() >= end_s:
                return
            victims = self._victims(number, chance, gentle=time.monotonic() > calm_s)
            blow = Blow(victims, recovering=False, at_s=time.monotonic())
            self.stage = "killed " + " and ".join(victim.name for victim in victims)
            blow.pids = self.site.kill(victims)
            self.blows.append(blow)
            await self.until_ready()
            blow.ready_s = time.monotonic()
            self.stage = "all ready"

    def _victims(self, number: int, chance: random.Random, gentle: bool) -> tuple[Program, ...]:
        """In turn; each fifth time two at once. `gentle`: only replicas that have a sibling."""
        spared = {Program("api", 0), Program("tokenizer", 0)}
        mortal = [program for program in self.site.programs if program not in spared]
        if gentle:
            mortal = [program for program in mortal if program.service in ("api", "tokenizer")] or mortal
        elif number % 5 == 4:
            return tuple(sorted(chance.sample(mortal, min(2, len(mortal)))))
        return (mortal[number % len(mortal)],)

    async def _lane(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        kinds, weights = list(LOAD), list(LOAD.values())
        while self._striking:
            kind = chance.choices(kinds, weights)[0]
            self.did[kind] += 1
            if kind in RUDE:
                await self._be_rude(kind, chance)
            else:
                outcome = await self._ask(kind, chance)
                if outcome is not None:
                    self.outcomes.append(outcome)
                    if outcome.end in ("refused", "unreachable"):
                        await asyncio.sleep(RETRY_S)
            await asyncio.sleep(self._pause_s)

    async def _ask(self, kind: str, chance: random.Random) -> Outcome | None:
        """None for a client that has left: it cannot know."""
        ask = chance.choice(self.asks)
        leave_after = chance.randint(1, 12)

        async def between(outcome: Outcome) -> None:
            if kind == "slow":
                await asyncio.sleep(SLOW_READ_S)
            elif len(outcome.arrivals) >= leave_after:
                raise Left

        if kind == "whole":
            body = {key: value for key, value in ask.body.items() if key not in ("stream", "stream_options")}
            ask = ask._replace(body=body)
        self.open += 1
        try:
            hook = between if kind in ("slow", "leave") else None
            return await run("127.0.0.1", self.site.system.port, ask, self.site.owner, hook)
        except Left:
            return None
        finally:
            self.open -= 1

    async def _be_rude(self, kind: str, chance: random.Random) -> None:
        began_s = time.monotonic()
        try:
            fault = await RUDE[kind]("127.0.0.1", self.site.system.port, chance)
        except TimeoutError:
            fault = "got no answer"
        except OSError as error:
            # An API process may have been killed with this connection.
            hit = any(
                victim.service == "api" for blow in self.blows for victim in blow.victims if blow.at_s > began_s - 5
            )
            fault = "" if hit else f"lost its connection: {error}"
        if fault:
            self.faults.append(f"{kind}: {fault}")
        await asyncio.sleep(RETRY_S)

    async def _sample(self, every_s: float) -> None:
        while True:
            await self._in_thread(self._look)
            self.tell()
            await asyncio.sleep(every_s)

    def _look(self) -> bool:
        """One sample of each process, and of the blocks' account."""
        at_s = time.monotonic() - self.started_s
        for program, process in self.site.processes().items():
            try:
                resident, files = process.memory_info().rss, process.num_fds()
            except psutil.Error:
                continue  # has just been killed
            self.samples.append(Sample(program, process.pid, at_s, resident / MIB, files))
        status = self.site.status()
        if status is not None and status.model is not None:
            self.watched += 1
            load = status.load
            used = load.blocks_total - load.blocks_free - load.blocks_cached
            if used < 0 or (used and not load.running and not load.tokens_in_flight):
                self.faults.append(f"{used} blocks are used by {load.running} running rows at {at_s:.0f} s: {load}")
        return True

    def lives(self) -> dict[Program, list[list[Sample]]]:
        """By program its lives in order, each as its samples."""
        found: dict[Program, dict[int, list[Sample]]] = {}
        for sample in self.samples:
            found.setdefault(sample.program, {}).setdefault(sample.pid, []).append(sample)
        return {program: list(lives.values()) for program, lives in sorted(found.items())}
