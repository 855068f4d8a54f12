"""The judge of `valence serve`, with made-up time."""

from common.config import load
from common.protocol import Load, Member, Peer, Status
from valence.programs import Program
from valence.supervisor import ProcessView
from valence.watch import GONE_S, LEAVE_S, START_S, Verdict, Watch

SCHEDULER, TOKENIZER, WORKER, API = (Program(service, 0) for service in ("scheduler", "tokenizer", "worker", "api"))
PIDS = {SCHEDULER: 1, TOKENIZER: 2, WORKER: 3, API: 4}
LINKS = load(None, ["links.dead_after_s=5", "links.stalled_after_s=60"]).links


class Run:
    """A watched system. Rounds come every half second; what changes is said before a round."""

    def __init__(self) -> None:
        self.watch = Watch(LINKS)
        self.now_s = 1000.0
        self.states = dict.fromkeys(PIDS, "running")
        self.pids = dict(PIDS)
        self.members = dict.fromkeys(PIDS, "ready")
        self.stalled: dict[Program, float] = {}
        self.scheduler = 77
        self.answers = True

    def status(self) -> Status | None:
        if not self.answers:
            return None
        members = []
        for program, state in self.members.items():
            first = self.scheduler if program.service == "scheduler" else 10 * self.pids[program]
            peer = Peer(program.service, program.instance, first + program.instance, "ipc://x", self.pids[program])
            counters = {"stalled_seconds": self.stalled.get(program, 0.0), "work_owed": 3.0}
            members.append(Member(peer, state, counters=counters))
        return Status(members, Load(), None)

    def rounds(self, seconds: float) -> list[Verdict]:
        found = []
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            views = [ProcessView(p, self.pids[p], state, 0.0, 0) for p, state in self.states.items()]
            found += self.watch.look(views, self.status(), self.now_s)
        return found

    def lose(self, program: Program) -> None:
        del self.members[program]


def started() -> Run:
    run = Run()
    assert run.rounds(10) == []
    return run


def test_one_that_the_scheduler_has_given_up_is_killed_once() -> None:
    run = started()
    run.lose(WORKER)
    assert run.rounds(GONE_S) == []
    assert run.rounds(20) == [Verdict(WORKER, 3, "the scheduler has given it up")]


def test_its_successor_is_judged_anew() -> None:
    run = started()
    run.lose(WORKER)
    assert len(run.rounds(5)) == 1
    run.pids[WORKER] = 33
    assert run.rounds(60) == []  # it starts
    run.members[WORKER] = "starting"
    assert run.rounds(3600) == []  # it loads
    run.lose(WORKER)
    assert run.rounds(5) == [Verdict(WORKER, 33, "the scheduler has given it up")]


def test_a_scheduler_that_does_not_answer_is_killed_and_nobody_else() -> None:
    run = started()
    run.answers = False
    assert run.rounds(LINKS.dead_after_s) == []
    assert run.rounds(30) == [Verdict(SCHEDULER, 1, "it has not answered for 5.5 s")]
    run.pids[SCHEDULER] = 11
    assert run.rounds(30) == []  # it starts


def test_a_new_scheduler_may_take_its_time_to_hear_of_everybody() -> None:
    run = started()
    run.answers = False
    run.rounds(3)
    run.answers, run.scheduler, run.pids[SCHEDULER] = True, 78, 11
    lost = run.members.pop(TOKENIZER)
    assert run.rounds(LINKS.dead_after_s) == []
    run.members[TOKENIZER] = lost
    assert run.rounds(30) == []
    run.lose(TOKENIZER)
    assert run.rounds(5) == [Verdict(TOKENIZER, 2, "the scheduler has given it up")]


def test_one_that_a_new_scheduler_never_hears_of_is_killed() -> None:
    run = started()
    run.scheduler, run.pids[SCHEDULER] = 78, 11
    run.lose(TOKENIZER)
    assert run.rounds(30) == [Verdict(TOKENIZER, 2, "the scheduler has given it up")]


def test_one_that_never_joins_is_killed_in_the_end() -> None:
    run = Run()
    run.lose(API)
    assert run.rounds(START_S) == []
    assert [verdict.program for verdict in run.rounds(5)] == [API]


def test_one_that_has_left_in_order_may_end_by_itself() -> None:
    run = started()
    run.members[API] = "draining"
    assert run.rounds(120) == []
    run.lose(API)
    assert run.rounds(LEAVE_S) == []
    assert [verdict.program for verdict in run.rounds(2)] == [API]


def test_one_that_the_supervisor_stops_is_left_alone() -> None:
    run = started()
    run.states[API] = "stopping"
    run.lose(API)
    assert run.rounds(600) == []


def test_after_a_time_without_rounds_nobody_is_late() -> None:
    run = started()
    run.lose(TOKENIZER)
    run.rounds(0.5)
    run.now_s += 3600.0  # the machine slept, or this process did not get to run
    assert run.rounds(GONE_S) == []
    assert len(run.rounds(2)) == 1
    run.answers = False
    run.rounds(1)
    run.now_s += 3600.0
    assert run.rounds(LINKS.dead_after_s) == []


def test_work_that_stands_still_ends_tokenizer_and_scheduler_only() -> None:
    run = started()
    run.stalled = dict.fromkeys(PIDS, 59.0)
    assert run.rounds(5) == []
    run.stalled = dict.fromkeys(PIDS, 61.0)
    assert run.rounds(5) == [
        Verdict(SCHEDULER, 1, "nothing done for 61 s, 3 waiting"),
        Verdict(TOKENIZER, 2, "nothing done for 61 s, 3 waiting"),
    ]


def test_a_start_or_a_drain_that_stands_still_is_not_ended() -> None:
    run = started()
    run.members[TOKENIZER], run.stalled = "starting", {TOKENIZER: 5000.0}
    assert run.rounds(5) == []
    run.members[TOKENIZER] = "draining"
    assert run.rounds(5) == []


def test_a_pid_of_another_host_is_no_proof_of_life() -> None:
    run = started()
    run.lose(TOKENIZER)
    run.pids[WORKER] = 2  # the same number by chance, there
    run.states = {TOKENIZER: "running", SCHEDULER: "running"}
    assert [verdict.program for verdict in run.rounds(5)] == [TOKENIZER]


def test_of_two_schedulers_the_silent_one_is_killed_and_what_only_it_knew_is_not() -> None:
    run = started()
    second = Program("scheduler", 1)
    run.states[second], run.pids[second], run.members[second] = "running", 5, "ready"
    assert run.rounds(10) == []
    run.lose(second)
    run.lose(WORKER)  # its own
    assert run.rounds(LINKS.dead_after_s) == []
    assert run.rounds(20) == [Verdict(second, 5, "it has not answered for 5.5 s")]


def test_one_whose_scheduler_has_left_may_take_its_time_to_find_another() -> None:
    run = started()
    second = Program("scheduler", 1)
    run.states[second], run.pids[second], run.members[second] = "running", 5, "ready"
    assert run.rounds(10) == []
    run.lose(second)
    del run.states[second]
    lost = run.members.pop(WORKER)
    assert run.rounds(LINKS.dead_after_s) == []
    run.members[WORKER] = lost
    assert run.rounds(10) == []
    run.lose(WORKER)
    assert run.rounds(5) == [Verdict(WORKER, 3, "the scheduler has given it up")]
