"""One simulated life of several schedulers behind tokenizers: real fleets, real streams and lanes, fake workers.

Everything follows from the seed. Schedulers die, hang, come back and drain; tokenizers die with their sequences; links
are in order and nothing more. At the end every choice has had exactly one terminal and the text that it has alone, and
no scheduler runs anything.
"""

from array import array
from collections import defaultdict, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from common.columns import unpack_i32, unpack_u64
from common.config import Kv, Scheduler
from common.dialects.registry import Dialects
from common.protocol import (
    FinishReason,
    Load,
    ModelFacts,
    PromptKind,
    Refused,
    Sampling,
    Submit,
    TextBatch,
    TokenBatch,
    WorkerReady,
    make_seq_id,
)
from common.vocabulary import Vocabulary
from services.scheduler.events import GroupReady, GroupResult, SendPlan, SendRefused, SendTokens, Tick, TokenizerLost
from services.scheduler.fleet import Fleet
from services.tokenizer.encode import Prompt
from services.tokenizer.formats import Formats
from services.tokenizer.lanes import Lanes
from services.tokenizer.outbox import Outbox
from services.tokenizer.streams import Streams, box_key
from tests.sim.fake_worker import FakeWorker
from tests.sim.language import Stream

VOCAB, EOS = 61, (2, 7)
WORDS = Vocabulary([bytes([48 + token]) for token in range(VOCAB)])
FACTS = ModelFacts("fake", "fake", VOCAB, 40, EOS, 4, 60)
LIMITS = Scheduler(max_rows=4, step_tokens=16, max_waiting=100)
DEAD_AFTER_S, RECOVER_S, STEP_S = 0.3, 2.0, 0.01


class Says(msgspec.Struct):
    """A scheduler's members, as far as they matter here."""

    draining: bool
    load: Load


class Greets(msgspec.Struct):
    """A tokenizer's first word to a scheduler, which is answered before anything that comes after it is read."""

    node: int


@dataclass
class Choice:
    prompt: list[int]
    sampling: Sampling
    origin: int
    seq_id: int
    tokenizer: int
    text: str = ""
    received: int = 0
    reason: FinishReason | None = None
    aborted: bool = False


class Side:
    """One scheduler with its worker. `inbox` outlives its process, as a link's queue does."""

    def __init__(self, instance: int) -> None:
        self.instance = instance
        self.inbox: deque[Any] = deque()
        self.incarnation = 0
        self.hangs = self.draining = False

    def start(self, incarnation: int, seed: int) -> None:
        self.incarnation, self.draining, self.hangs = incarnation, False, False
        self.fleet = Fleet(LIMITS, Kv(), seed, RECOVER_S)
        self.worker = FakeWorker(FACTS, LIMITS.max_rows, LIMITS.step_tokens, 0, defaultdict(int))


class Node:
    """One tokenizer: what `services/tokenizer/process.py` does with the streams, without sockets."""

    def __init__(self, instance: int, world: "World") -> None:
        self.instance, self.world = instance, world
        self.inbox: deque[tuple[int, int, Any]] = deque()  # scheduler, its incarnation, message
        self.known: dict[int, tuple[int, float, Says]] = {}  # by scheduler: incarnation, when it spoke, what it said
        self.lanes = Lanes(self._tell, self._takers, self._speakers)
        self.streams = Streams(self.lanes)
        self.streams.speak(Formats(Dialects(None, None), WORDS))
        self.box = self.streams.boxes[box_key(make_seq_id(0, instance, 1, 0))] = Outbox(1, 0.0)

    def _tell(self, scheduler: int, message: Any) -> bool:
        self.world.sides[scheduler].inbox.append(message)
        return True

    def _speakers(self) -> list[int]:
        return [key for key, (_, at_s, _) in self.known.items() if self.world.now_s - at_s < DEAD_AFTER_S / 2]

    def _takers(self) -> list[int]:
        return [key for key in self._speakers() if not self.known[key][2].draining]

    def submit(self, choice: Choice) -> None:
        moved = choice.seq_id != choice.origin
        submit = Submit(choice.seq_id, PromptKind.TOKENS, choice.sampling)
        if moved:
            more = {"origin": choice.origin, "delivered_tokens": choice.received, "delivered_chars": len(choice.text)}
            submit = msgspec.structs.replace(submit, **more)
        request = self.streams.open(submit, self.box)
        assert request is not None
        self.streams.admit(request, Prompt(array("i", choice.prompt)), FACTS)

    def take(self) -> None:
        instance, incarnation, message = self.inbox.popleft()
        known = self.known.get(instance, (0, 0.0, None))[0]
        if isinstance(message, Says):
            if incarnation >= known:
                self._hear(instance, incarnation, message)
        elif incarnation == known:
            if isinstance(message, TokenBatch):
                self.streams.take(message, instance)
            else:
                self.streams.refused(message, instance)

    def _hear(self, instance: int, incarnation: int, says: Says) -> None:
        renewed = self.known.get(instance, (0, 0.0, says))[0] != incarnation
        now_s = self.world.now_s
        self.known[instance] = incarnation, now_s, says
        if renewed:
            self.lanes.renewed(instance)
        self.lanes.lane(instance).told(says.load, FACTS)
        for each in list(self.lanes.all):
            _, at_s, last = self.known.get(each, (0, float("-inf"), says))
            if last.draining or now_s - at_s > DEAD_AFTER_S:
                self.lanes.leave(each, answers=now_s - at_s <= DEAD_AFTER_S)
        self.lanes.heard(instance, now_s, DEAD_AFTER_S)

    def flush(self) -> None:
        assert self.streams.flush(self.world.receive)


@dataclass
class World:
    seed: int
    now_s: float = 0.0
    choices: dict[int, Choice] = field(default_factory=dict)  # by present id
    counter: int = 0
    starts: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.sides = [Side(instance) for instance in range(self.random.choice((2, 2, 3)))]
        self.nodes = [Node(instance, self) for instance in range(2)]
        for side in self.sides:
            self._start(side)
        for _ in range(20):
            self._beat()
            self._turn()

    def run(self, actions: int = 400) -> None:
        rates = {"admit": 6, "abort": 0.5, "kill": 0.4, "hang": 0.4, "resume": 1, "drain": 0.4, "lose_node": 0.3}
        names = [*rates, "turn"]
        for _ in range(actions):
            getattr(self, f"_{self.random.choices(names, [*rates.values(), 40])[0]}")()
            if self.random.random() < 0.3:
                self._beat()
        for side in self.sides:
            side.hangs = False
        for number in range(6000):
            if number % 5 == 0:
                self._beat()
            self._turn()
            if number > 1000 and not self.choices and all(side.fleet.idle for side in self.sides):
                break
        assert not self.choices, f"{len(self.choices)} choices have no terminal"
        for side in self.sides:
            assert side.fleet.idle, f"scheduler {side.instance} runs what nobody waits for"
        for node in self.nodes:
            assert not node.streams.open_requests and not any(lane.asked for lane in node.lanes.all.values())

    # --- the outside --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        node = self.random.choice(self.nodes)
        prompt = [self.random.randrange(8, VOCAB) for _ in range(self.random.randint(1, 12))]
        sampling = Sampling(self.random.randint(1, 20), seed=self.random.randrange(100))
        seq_id = self._new_id(node)
        choice = self.choices[seq_id] = Choice(prompt, sampling, seq_id, seq_id, node.instance)
        node.submit(choice)

    def _new_id(self, node: Node) -> int:
        self.counter += 1
        return make_seq_id(0, node.instance, 1, self.counter)

    def _abort(self) -> None:
        if self.choices:
            choice = self.random.choice(list(self.choices.values()))
            choice.aborted = True
            self.nodes[choice.tokenizer].streams.abort(choice.seq_id)
            self.nodes[choice.tokenizer].flush()

    def _lose_node(self) -> None:
        """A tokenizer dies; its last words arrive before the schedulers hear of it. Its choices are handed over."""
        old = self.random.choice(self.nodes)
        for side in self.sides:
            side.inbox.append(TokenizerLost(old.instance))
        new = self.nodes[old.instance] = Node(old.instance, self)
        for side in self.sides:
            if side.hangs:
                side.inbox.append(Greets(old.instance))
            else:
                new._hear(side.instance, side.incarnation, Says(side.draining, side.fleet.load()))
        for choice in [each for each in self.choices.values() if each.tokenizer == old.instance]:
            node = self.random.choice(self.nodes)
            del self.choices[choice.seq_id]
            choice.seq_id, choice.tokenizer = self._new_id(node), node.instance
            self.choices[choice.seq_id] = choice
            node.submit(choice)

    def receive(self, incarnation: int, message: Any) -> bool:
        """What a tokenizer sends to the API."""
        assert isinstance(message, TextBatch), message
        columns = unpack_u64(message.seq_ids), unpack_i32(message.first_index), unpack_i32(message.counts)
        for seq_id, first, count, text in zip(*columns, message.texts, strict=True):
            choice = self.choices[seq_id]
            assert first == choice.received, "a gap or a repeat"
            choice.received, choice.text = first + count, choice.text + text
        for end in message.finished:
            choice = self.choices.pop(end.seq_id)
            if choice.aborted:
                continue
            alone = Stream.alone(choice.prompt, 0, choice.sampling, FACTS.max_model_len, VOCAB, EOS)
            tokens = alone.tokens[:-1] if alone.reason is FinishReason.EOS else alone.tokens
            assert (end.reason, choice.text) == (alone.reason, "".join(chr(48 + token) for token in tokens)), end
        return True

    # --- the schedulers -----------------------------------------------------------------------------------------------

    def _start(self, side: Side) -> None:
        self.starts += 1
        side.start(self.starts, self.seed)
        self._handle(side, [GroupReady(0, WorkerReady(FACTS, LIMITS.max_rows))])
        self._say(side)  # before anything else: it reads nothing of a tokenizer before its Hello, and answers that

    def _say(self, side: Side) -> None:
        for node in self.nodes:
            node.inbox.append((side.instance, side.incarnation, Says(side.draining, side.fleet.load())))

    def _kill(self) -> None:
        """What it has sent is still on its way; of what was sent to it, its successor gets the end."""
        side = self.random.choice(self.sides)
        for _ in range(self.random.randint(0, len(side.inbox))):
            side.inbox.popleft()
        self._start(side)

    def _hang(self) -> None:
        self.random.choice(self.sides).hangs = True

    def _resume(self) -> None:
        self.random.choice(self.sides).hangs = False

    def _drain(self) -> None:
        self.random.choice(self.sides).draining = True

    def _beat(self) -> None:
        """Each scheduler that lives tells its members; one that has drained is restarted."""
        for side in self.sides:
            if side.hangs:
                continue
            self._handle(side, [Tick()])
            if side.draining and side.fleet.idle and self.random.random() < 0.2:
                self._start(side)
            self._say(side)

    def _turn(self) -> None:
        """Some time passes: schedulers, workers and tokenizers do some of what they have to do."""
        self.now_s += STEP_S
        for side in self.sides:
            if side.hangs:
                continue
            self._read(side, [side.inbox.popleft() for _ in range(self.random.randint(0, len(side.inbox)))])
            if side.worker.plans and self.random.random() < 0.5:
                side.worker.step(False)
                self._handle(side, [GroupResult(0, side.worker.results.popleft())])
        for node in self.nodes:
            for _ in range(self.random.randint(0, len(node.inbox))):
                node.take()
            node.flush()

    def _read(self, side: Side, messages: list[Any]) -> None:
        events: list[Any] = []
        for message in messages:
            if isinstance(message, Greets):
                self._handle(side, events)
                events = []
                says = Says(side.draining, side.fleet.load())
                self.nodes[message.node].inbox.append((side.instance, side.incarnation, says))
            else:
                events.append(message)
        self._handle(side, events)

    def _handle(self, side: Side, events: list[Any]) -> None:
        effects = side.fleet.handle(events, self.now_s)
        if events or effects:  # most turns have none, and to check is most of what a life costs
            side.fleet.check()
        for effect in effects:
            match effect:
                case SendPlan(plan, _):
                    side.worker.plans.append(plan)
                case SendTokens(tokenizer, batch):
                    self.nodes[tokenizer].inbox.append((side.instance, side.incarnation, batch))
                case SendRefused(tokenizer, refused):
                    assert isinstance(refused, Refused)
                    self.nodes[tokenizer].inbox.append((side.instance, side.incarnation, refused))
