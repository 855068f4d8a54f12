"""The schedulers as this tokenizer sees them: what each has of our sequences, and what waits to be sent to it.

Owned by the Streams; the process tells who takes work. A sequence is in the lane of the scheduler that has it, so that
tokens of any other find nothing. One that came from a dead tokenizer is asked for at all schedulers: it is in no lane
until its scheduler's tokens come, or all have denied it. What is taken away from a scheduler is aborted there as soon
as it speaks, and may return only after the last of its old tokens: when the scheduler has told of its end, or
`expire_s` later.
"""

from collections.abc import Callable

import msgspec

from common.kv_needs import longest_of
from common.protocol import Abort, Admit, Load, ModelFacts
from services.tokenizer.choice import TOKEN_BYTES, Candidate, choose
from services.tokenizer.outbox import Upstream
from services.tokenizer.sequence import Sequence, admission

Tell = Callable[[int, msgspec.Struct], bool]  # scheduler's instance and message; False: its link is full


class Lane:
    """One scheduler."""

    __slots__ = ("asked", "instance", "leaving", "longest", "moved", "num_blocks", "others", "sequences", "upstream")

    def __init__(self, instance: int, tell: Tell) -> None:
        self.instance = instance
        self.upstream = Upstream(lambda message: tell(instance, message))
        self.sequences: dict[int, Sequence] = {}  # that it has
        self.asked: dict[int, Sequence] = {}  # that it may have
        self.moved: list[int] = []  # taken away, which it has not been told yet
        self.leaving: dict[int, float] = {}  # aborted there, at that time; its last word on them has not come
        self.others = self.num_blocks = 0  # sequences of other tokenizers, KV blocks
        self.longest = 0  # tokens that it can run; 0: not known

    @property
    def num_open(self) -> int:
        return self.others + len(self.sequences)

    def told(self, load: Load, model: ModelFacts | None) -> None:
        """What the scheduler says of itself."""
        self.others = max(0, load.running + load.waiting - len(self.sequences))
        self.num_blocks = load.blocks_total
        if model is not None:
            self.longest = longest_of(model)

    def barred(self, seq_id: int) -> bool:
        """Whether old tokens of it may still come from there."""
        return seq_id in self.leaving or seq_id in self.moved


class Lanes:
    """`takers` gives the instances that take new work, `speakers` those that answer at all; both may be empty."""

    def __init__(self, tell: Tell, takers: Callable[[], list[int]], speakers: Callable[[], list[int]]) -> None:
        self.all: dict[int, Lane] = {}  # by instance
        self._tell, self._takers, self._speakers = tell, takers, speakers

    def lane(self, instance: int) -> Lane:
        lane = self.all.get(instance)
        if lane is None:
            lane = self.all[instance] = Lane(instance, self._tell)
        return lane

    def choose(self, tokens: bytes, salt: str, seq_id: int) -> Lane:
        """For a request, or a sequence that was admitted before; `tokens` is an _i32 column."""
        takers = [self.lane(instance) for instance in self._takers() or self._speakers()]
        if len(takers) < 2:
            return takers[0] if takers else self.lane(min(self.all, default=0))  # it waits there, or moves on
        size = len(tokens) // TOKEN_BYTES
        free = [lane for lane in takers if not lane.barred(seq_id)]
        fit = [lane for lane in free if not lane.longest or size < lane.longest]
        candidates = [Candidate(each.instance, each.num_open, each.num_blocks) for each in fit or free or takers]
        return self.all[choose(tokens, salt, seq_id, candidates)]

    # --- sequences ----------------------------------------------------------------------------------------------------

    def place(self, sequence: Sequence, lane: Lane) -> None:
        """The scheduler has been told of it."""
        if lane.instance != (sequence.lane.instance if sequence.lane else 0):
            sequence.box.engines[sequence.seq_id] = lane.instance
        sequence.lane = lane
        lane.sequences[sequence.seq_id] = sequence

    def go_on(self, sequence: Sequence) -> None:
        """Its scheduler has ended it; it is to go on behind its output."""
        self.put(sequence, admission(sequence))

    def step(self, sequence: Sequence, lane: Lane) -> None:
        """A scheduler is to compute the next token of this beam."""
        lane.upstream.put(admission(sequence, again=False))
        self.place(sequence, lane)

    def rest(self, sequence: Sequence) -> None:
        """It has what its scheduler was asked for; nobody computes for it."""
        if sequence.lane is not None:
            del sequence.lane.sequences[sequence.seq_id]
            sequence.lane = None

    def ask(self, sequence: Sequence) -> None:
        """Looks for a sequence that a dead tokenizer had. A lone scheduler admits it if it does not know it."""
        speakers = self._speakers()
        if len(speakers) < 2:
            self._admit(sequence, admission(sequence, again=False))
            return
        question = msgspec.structs.replace(admission(sequence, again=False), attach=True)
        for instance in speakers:
            lane = self.lane(instance)
            lane.asked[sequence.seq_id] = sequence
            lane.upstream.put(question)

    @property
    def asking(self) -> bool:
        return any(lane.asked for lane in self.all.values())

    def found(self, seq_ids: set[int], lane: Lane) -> None:
        """A scheduler has sent something for these: it has those that are looked for.

        Also if it does not owe an answer any more: a successor reads what its predecessor was asked, and may have got
        the sequence from the dead tokenizer's last words.
        """
        for other in list(self.all.values()):
            for seq_id in other.asked.keys() & seq_ids:
                self._settle(other.asked[seq_id], lane)

    def denied(self, seq_id: int, lane: Lane) -> None:
        """It does not have what it was asked for. If nobody has, the sequence is admitted like any other."""
        lane.leaving.pop(seq_id, None)
        sequence = lane.asked.pop(seq_id, None)
        if sequence is not None and not any(seq_id in other.asked for other in self.all.values()):
            self._admit(sequence, admission(sequence))

    def _admit(self, sequence: Sequence, admit: Admit) -> None:
        lane = self.choose(admit.tokens, admit.cache_salt, admit.seq_id)
        lane.upstream.put(admit)
        self._settle(sequence, lane)

    def _settle(self, sequence: Sequence, lane: Lane) -> None:
        """This scheduler has it. Others may have an old copy, or get it yet from the dead tokenizer's last words."""
        origin = sequence.request.submit.origin
        for other in self.all.values():
            owes = other.asked.pop(sequence.seq_id, None) is not None
            if other is lane:
                continue
            if owes:
                other.moved.append(sequence.seq_id)  # it may yet take over what it was asked for
            if origin >= 0:
                other.upstream.put(Abort(origin))
        self.place(sequence, lane)

    def put(self, sequence: Sequence, message: msgspec.Struct) -> None:
        """To the scheduler that has it, or to all that may."""
        if sequence.lane is not None:
            sequence.lane.upstream.put(message)
            return
        for lane in self.all.values():
            if sequence.seq_id in lane.asked:
                lane.upstream.put(message)

    def put_all(self, message: msgspec.Struct) -> None:
        for lane in self.all.values() or [self.lane(0)]:
            lane.upstream.put(message)

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        if sequence.lane is not None:
            del sequence.lane.sequences[sequence.seq_id]
            return
        for lane in self.all.values():
            lane.asked.pop(sequence.seq_id, None)

    # --- changes of the schedulers ------------------------------------------------------------------------------------

    def renewed(self, instance: int) -> None:
        """Another process is this scheduler now. It knows nothing: all that it should have is handed to it again.

        But it reads what was on its way to its predecessor, which may be an admission of what has been taken away.
        """
        lane = self.lane(instance)
        lane.upstream.clear()
        lane.moved += lane.leaving
        lane.leaving.clear()
        for seq_id in list(lane.asked):
            self.denied(seq_id, lane)
        for sequence in lane.sequences.values():
            lane.upstream.put(admission(sequence))

    def heard(self, instance: int, now_s: float, expire_s: float) -> None:
        """A scheduler speaks: it is told what others go on with, and what was told long ago is over."""
        lane = self.lane(instance)
        for seq_id in lane.moved:
            lane.upstream.put(Abort(seq_id))
            lane.leaving[seq_id] = now_s
        lane.moved.clear()
        for seq_id in [key for key, since_s in lane.leaving.items() if now_s - since_s > expire_s]:
            del lane.leaving[seq_id]

    def leave(self, instance: int, starved: bool = False, answers: bool = False) -> None:
        """Others go on with what this scheduler has, as far as there are others. Harmless to repeat.

        `starved`: it has lost its workers. Only once for a sequence: it may be what kills them.
        `answers`: it will still say whether it has what it was asked for.
        """
        lane = self.lane(instance)
        if not lane.sequences and not lane.asked:
            return
        better = [self.lane(each) for each in self._takers() if each != instance]
        for seq_id in list(lane.asked) if better and not answers else ():
            self.denied(seq_id, lane)
        for seq_id, sequence in list(lane.sequences.items()):
            if (starved and sequence.starved) or all(other.barred(seq_id) for other in better):
                continue
            sequence.starved |= starved
            del lane.sequences[seq_id]
            lane.moved.append(seq_id)
            self._move(sequence)

    def _move(self, sequence: Sequence) -> None:
        admit = admission(sequence)
        lane = self.choose(admit.tokens + admit.output, admit.cache_salt, admit.seq_id)
        lane.upstream.put(admit)
        self.place(sequence, lane)

    def flush(self) -> bool:
        sent = [lane.upstream.flush() for lane in self.all.values()]
        return all(sent)
