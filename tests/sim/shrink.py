"""Finds a short failing life in a long one: `python -m tests.sim.shrink SEED`.

The random choices of a life come through `Decisions`, which first records them, turn by turn and event by event, and
then repeats such a script. Shrinking leaves turns, events and choices out, or takes simpler choices, as long as the
life fails at the same place. A choice that the script does not have is the simplest one.
"""

import argparse
import copy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import msgspec
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from common.columns import unpack_i32
from tests.sim import world as simulated
from tests.sim.world import World

NO = 0.999  # `random() < p` is False
Draw = tuple[str, Any]  # method, and the index, number or list that it gave


@dataclass(eq=False)
class Happening:
    """One event of a turn and the choices inside it."""

    name: str
    draws: list[Draw] = field(default_factory=list)


@dataclass
class Script:
    """All decisions of a life: its limits and rates, its turns, and what is decided after the last one."""

    setup: list[Draw] = field(default_factory=list)
    turns: list[list[Happening]] = field(default_factory=list)
    tail: list[Draw] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, int, int]:
        """Smaller is simpler: events, turns, choices."""
        events = [event for turn in self.turns for event in turn]
        numbers = [*self.setup, *self.tail, *(draw for event in events for draw in event.draws)]
        return len(events), len(self.turns), sum(_weight(draw) for draw in numbers)


def _weight(draw: Draw) -> int:
    value = draw[1]
    if isinstance(value, float):
        return int(value != NO)
    return sum(map(int, value)) if isinstance(value, list) else int(value)


class Decisions:
    """Stands for the `Random` of a life. With a script it repeats that, without one it records `script`."""

    def __init__(self, seed: int, script: Script | None = None) -> None:
        self._source = Random(seed)
        self._replays = script is not None
        self.script = Script() if script is None else script
        self._turn = -1
        self._left: list[Happening] = []  # of the present turn, not begun
        self._inside: list[Draw] | None = None  # choices of the event that happens now
        self._places: dict[int, int] = {}  # of lists of choices: how far they are read

    def event(self, name: str, happen: Callable[[], Any]) -> Any:
        """Lets an event of the world happen; its choices are its own."""
        if self._inside is not None:
            return happen()  # an event within an event
        expected = next((each for each in self._left if each.name == name), None)
        if expected is not None:
            self._left.remove(expected)
        self._inside = expected.draws if expected is not None else self.script.tail
        try:
            return happen()
        finally:
            self._inside = None

    def choice(self, options: Sequence[Any]) -> Any:
        index = self._draw("choice", lambda: self._source.randrange(len(options)), 0)
        return options[min(index, len(options) - 1)]

    def choices(self, options: Sequence[Any], weights: Sequence[float] | None = None, k: int = 1) -> list[Any]:
        if self._inside is None and options and isinstance(options[0], str):
            return self._next_turn(options, weights, k)
        indices = self._draw("choices", lambda: self._source.choices(range(len(options)), weights, k=k), [])
        indices = (list(indices) + [0] * k)[:k]
        return [options[min(index, len(options) - 1)] for index in indices]

    def sample(self, options: Sequence[Any], k: int) -> list[Any]:
        indices = self._draw("sample", lambda: self._source.sample(range(len(options)), k), [])
        kept = [index for index in dict.fromkeys(indices) if index < len(options)]
        kept += [index for index in range(len(options)) if index not in kept]
        return [options[index] for index in kept[:k]]

    def random(self) -> float:
        return float(self._draw("random", self._source.random, NO))

    def randint(self, least: int, most: int) -> int:
        return least + min(
            int(self._draw("randint", lambda: self._source.randint(least, most) - least, 0)), most - least
        )

    def randrange(self, stop: int) -> int:
        return min(int(self._draw("randrange", lambda: self._source.randrange(stop), 0)), stop - 1)

    def getrandbits(self, bits: int) -> int:
        return int(self._draw("getrandbits", lambda: self._source.getrandbits(bits), 0)) & (1 << bits) - 1

    def _next_turn(self, options: Sequence[str], weights: Sequence[float] | None, k: int) -> list[str]:
        self._turn += 1
        if self._replays:
            self._left = list(self.script.turns[self._turn])
        else:
            self._left = [Happening(name) for name in self._source.choices(options, weights, k=k)]
            self.script.turns.append(list(self._left))
            self.script.tail.clear()  # what was decided since the turn before belongs to this one
        return [happening.name for happening in self._left]

    def _draw(self, method: str, source: Callable[[], Any], simplest: Any) -> Any:
        draws = self._inside
        if draws is None:
            draws = self.script.setup if self._turn < 0 else self.script.tail
        if not self._replays:
            draws.append((method, source()))
            return draws[-1][1]
        if draws is self.script.tail and self._turn < len(self.script.turns) - 1:
            return simplest  # how many events a turn has is known
        place = self._places.get(id(draws), 0)
        if place < len(draws) and draws[place][0] == method:
            self._places[id(draws)] = place + 1
            return draws[place][1]
        return simplest


@contextmanager
def _world(seed: int, decisions: Decisions) -> Iterator[World]:
    """A world that decides by `decisions`."""
    first = iter((decisions,))
    with mock.patch.object(simulated, "Random", lambda number: next(first, None) or Random(number)):
        world = World(seed)
        for name in dir(world):
            happen = getattr(world, name)
            if name.startswith("_") and not name.startswith("__") and name[1:] in NAMES and callable(happen):
                setattr(world, name, lambda name=name, happen=happen: decisions.event(name[1:], happen))
        yield world


NAMES = frozenset(World._rates(World(0)))


def failure(seed: int, decisions: Decisions, actions: int, on_world: Callable[[World], None] | None = None) -> str:
    """Where the life fails, or ""."""
    with _world(seed, decisions) as world:
        if on_world is not None:
            on_world(world)
        try:
            world.run(actions)
        except Exception as error:  # noqa: BLE001 (whatever a broken core raises is what is looked for)
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} in {frame.name}, line {frame.lineno} of {frame.filename.rpartition('/')[2]}"
    return ""


class Shrinker:
    """`fails` tells whether a script still fails in the same way; `tried` and `best` are for people who wait."""

    def __init__(self, script: Script, fails: Callable[[Script], bool], most: int) -> None:
        self.best = script
        self.tried = 0
        self._fails, self._most = fails, most

    def run(self) -> Script:
        """Until nothing gets simpler, or `most` lives have been tried."""
        before = None
        while before != self.best.size and self.tried < self._most:
            before = self.best.size
            self._drop_turns()
            self._drop_events()
            self._simplify()
        return self.best

    def _try(self, script: Script) -> bool:
        if self.tried >= self._most or script.size >= self.best.size:
            return False
        self.tried += 1
        if self._fails(script):
            self.best = script
            return True
        return False

    def _drop_turns(self) -> None:
        """Delta debugging: halves, quarters, ... of all turns."""
        chunk = max(len(self.best.turns), 1)
        while chunk:
            begin = max(len(self.best.turns) - chunk, 0)
            while True:
                script = copy.deepcopy(self.best)
                del script.turns[begin : begin + chunk]
                self._try(script)
                if begin == 0:
                    break
                begin = max(begin - chunk, 0)
            chunk //= 2

    def _drop_events(self) -> None:
        for place in reversed(range(len(self.best.turns))):
            for event in reversed(range(len(self.best.turns[place]))):
                script = copy.deepcopy(self.best)
                del script.turns[place][event]
                self._try(script)

    def _simplify(self) -> None:
        """Simpler choices, one list of them after the other."""
        lists: list[Callable[[Script], list[Draw]]] = [lambda script: script.setup, lambda script: script.tail]
        for turn, events in enumerate(self.best.turns):
            lists += [
                lambda script, turn=turn, event=event: script.turns[turn][event].draws  # type: ignore[misc]
                for event in range(len(events))
            ]
        for find in lists:
            for place in reversed(range(len(find(self.best)))):
                method, value = find(self.best)[place]
                for simpler in _simpler(value):
                    script = copy.deepcopy(self.best)
                    find(script)[place] = (method, simpler)
                    if self._try(script):
                        break


def _simpler(value: Any) -> list[Any]:
    """Simplest first."""
    if isinstance(value, float):
        return [NO] if value != NO else []
    if isinstance(value, list):
        return [[], value[: len(value) // 2], [0] * len(value)] if value else []
    return [number for number in (0, value // 4, value // 2, value - 1) if 0 <= number < value]


def shrink(seed: int, actions: int, most: int = 4000, watch: Callable[[Shrinker], None] | None = None) -> Script | None:
    """The shortest script found that fails where the seed's life fails; None if that does not fail."""
    recorder = Decisions(seed)
    where = failure(seed, recorder, actions)
    if not where:
        return None

    def fails(script: Script) -> bool:
        if watch is not None:
            watch(shrinker)
        return failure(seed, Decisions(seed, script), len(script.turns)) == where

    shrinker = Shrinker(recorder.script, fails, most)
    if not fails(recorder.script):
        raise AssertionError("the recorded life does not fail again: something decides beside the decisions")
    return shrinker.run()


def tell(seed: int, script: Script) -> list[str]:
    """What happens in a script's life, one line per event and per effect, and how it fails."""
    lines: list[str] = []

    def listen(world: World) -> None:
        handle, on_effect = world._handle, world._on_effect

        def tell_handle(events: list[Any]) -> None:
            lines.extend(f"  {brief(event)}" for event in events)
            handle(events)

        def tell_effect(effect: Any) -> None:
            lines.append(f"      -> {brief(effect)}")
            on_effect(effect)

        world._handle, world._on_effect = tell_handle, tell_effect  # type: ignore[method-assign]
        lines.append(f"{world.limits}")

    lines.append(failure(seed, Decisions(seed, script), len(script.turns), listen) or "no failure")
    return lines


def brief(value: Any) -> str:
    """A message in one line: only fields that say something, columns as numbers."""
    if isinstance(value, bytes):
        return str(list(unpack_i32(value))) if len(value) % 4 == 0 else value.hex()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(brief, value))}]"
    if not isinstance(value, msgspec.Struct):
        return repr(value)
    said = []
    for each in msgspec.structs.fields(type(value)):
        content = getattr(value, each.name)
        if content != each.default and content not in (b"", [], ()):
            said.append(f"{each.name}={hex(content) if each.name == 'seq_id' else brief(content)}")
    return f"{type(value).__name__}({', '.join(said)})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.sim.shrink", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--actions", type=int, default=250, help="of the life, as where it failed")
    parser.add_argument("--most", type=int, default=4000, help="lives to try")
    options = parser.parse_args()
    console = Console()
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("the first life")

        def watch(shrinker: Shrinker) -> None:
            events, turns, _ = shrinker.best.size
            progress.update(
                task, description=f"{shrinker.tried} lives tried, {events} events in {turns} turns are left"
            )

        script = shrink(options.seed, options.actions, options.most, watch)
    if script is None:
        console.print(f"seed {options.seed} does not fail")
        return 1
    for line in tell(options.seed, script):
        console.print(line, markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
