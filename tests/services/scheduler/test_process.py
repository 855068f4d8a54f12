"""The scheduler as a real process on real sockets; the test plays tokenizer, API, worker and administrator."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from common.columns import pack_i32, pack_u64, unpack_i32, unpack_u64
from common.config import Kv, load
from common.lifecycle import Process
from common.protocol import (
    Abort,
    Admit,
    Control,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    Members,
    ModelFacts,
    Peer,
    Refused,
    Sampling,
    Schedulers,
    Status,
    StatusQuery,
    StepPlan,
    StepResult,
    Story,
    StoryQuery,
    ToAdmin,
    ToApi,
    TokenBatch,
    ToTokenizer,
    ToWorker,
    WorkerReady,
    make_seq_id,
)
from common.transport import Inbox, LinkCounters, Push
from services.scheduler.fleet import Fleet
from services.scheduler.process import SchedulerProcess

LIMIT_S = 240
FACTS = ModelFacts("m", "x", vocab_size=100, max_model_len=64, eos_token_ids=(0,), block_tokens=4, num_blocks=32)


class Actor:
    """One process of the system, played by the test."""

    def __init__(
        self, run_dir: Path, endpoint: str, service: str, incarnation: int, union: Any, instance: int = 0
    ) -> None:
        self.inbox: Inbox = Inbox(f"ipc://{run_dir}/{service}-{incarnation}", union, 1000, LinkCounters())
        self.peer = Peer(service, instance, incarnation, self.inbox.endpoint)
        self.push = Push(endpoint, incarnation, 1000, LinkCounters())
        self.seen: list = []

    def join(self) -> Members:
        self.push.send(Hello(self.peer, "hash"))
        self.push.send(Heartbeat("ready", 0))
        return self.until(
            lambda m: isinstance(m, Members) and self.peer.incarnation in {x.peer.incarnation for x in m.members}
        )

    def until(self, found: Callable[[Any], bool]) -> Any:
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            while self.seen:
                _, message = self.seen.pop(0)
                if found(message):
                    return message
            self.inbox.wait(1)
            self.seen += self.inbox.drain()
        raise AssertionError("the message did not come")

    def next(self, kind: type) -> Any:
        return self.until(lambda m: isinstance(m, kind))

    def batch(self) -> TokenBatch:
        """The next tokens or ends. A batch may also only say that a request is accepted."""
        return self.until(lambda m: isinstance(m, TokenBatch) and (m.tokens or m.finished))

    def close(self) -> None:
        self.push.close()
        self.inbox.close()


class Stage:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.endpoint = f"ipc://{run_dir}/scheduler"
        self.actors: list[Actor] = []

    def actor(self, service: str, incarnation: int, union: Any, instance: int = 0) -> Actor:
        actor = Actor(self.run_dir, self.endpoint, service, incarnation, union, instance)
        self.actors.append(actor)
        return actor

    def tokenizer(self, incarnation: int = 21) -> Actor:
        tokenizer = self.actor("tokenizer", incarnation, ToTokenizer)
        tokenizer.join()
        return tokenizer

    def worker(self, incarnation: int = 31, instance: int = 0, facts: ModelFacts = FACTS) -> Actor:
        worker = self.actor("worker", incarnation, ToWorker, instance)
        worker.join()
        worker.push.send(WorkerReady(facts, 8))
        return worker


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for actor in stage.actors:
        actor.close()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[subprocess.Popen]:
    settings = [f"links.run_dir={tmp_path}", "links.heartbeat_s=0.05", "links.dead_after_s=60"]
    command = [sys.executable, "-m", "services.scheduler", *[f"--set={setting}" for setting in settings]]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


SEQ = make_seq_id(0, 0, 5, 1)


def admit(seq_id: int = SEQ, max_tokens: int = 3) -> Admit:
    return Admit(seq_id, pack_i32([7, 8, 9]), Sampling(max_tokens=max_tokens))


def answer(worker: Actor, token: int) -> StepPlan:
    """Runs the next plan of the worker."""
    plan = worker.next(StepPlan)
    worker.push.send(StepResult(plan.step, pack_i32([token] * plan.samples.count(1))))
    return plan


def test_a_request_goes_through(scheduler: subprocess.Popen, stage: Stage) -> None:
    tokenizer, worker = stage.tokenizer(), stage.worker()
    tokenizer.until(lambda m: isinstance(m, Members) and m.model == FACTS)
    tokenizer.push.send(admit())
    plan = answer(worker, 41)
    assert unpack_i32(plan.added[0].tokens).tolist() == [7, 8, 9]
    answer(worker, 42)
    answer(worker, 43)
    tokens, finished = [], []
    while not finished:
        batch = tokenizer.batch()
        assert set(unpack_u64(batch.seq_ids)) <= {SEQ}
        tokens += unpack_i32(batch.tokens).tolist()
        finished += batch.finished
    assert tokens == [41, 42, 43]
    assert [(f.seq_id, f.reason) for f in finished] == [(SEQ, FinishReason.LENGTH)]


def test_early_admissions_wait_for_the_first_worker(scheduler: subprocess.Popen, stage: Stage) -> None:
    tokenizer = stage.tokenizer()
    tokenizer.push.send(admit())
    tokenizer.push.send(admit(SEQ + 1))
    tokenizer.push.send(Abort(SEQ))
    worker = stage.worker()
    plan = answer(worker, 41)
    assert [row.seq_id for row in plan.added] == [SEQ + 1]


def test_a_lost_worker_is_replaced_and_its_rows_run_again(scheduler: subprocess.Popen, stage: Stage) -> None:
    tokenizer, worker = stage.tokenizer(), stage.worker()
    tokenizer.push.send(admit())
    answer(worker, 41)
    assert unpack_i32(tokenizer.batch().tokens).tolist() == [41]
    successor = stage.worker(incarnation=32)  # same instance: replaces the first
    plan = answer(successor, 42)
    assert unpack_i32(plan.added[0].tokens).tolist() == [7, 8, 9, 41]
    assert unpack_i32(tokenizer.batch().tokens).tolist() == [42]
    worker.push.send(StepResult(2, pack_i32([99])))
    answer(successor, 43)
    batch = tokenizer.batch()
    assert (unpack_i32(batch.tokens).tolist(), len(batch.finished)) == ([43], 1)


def state_of(members: Any, actor: Actor) -> str:
    return next((m.state for m in members.members if m.peer.incarnation == actor.peer.incarnation), "gone")


def test_a_dead_workers_rows_go_on_at_another_one(scheduler: subprocess.Popen, stage: Stage) -> None:
    tokenizer = stage.tokenizer()
    workers = [stage.worker(31 + number, number) for number in range(2)]
    workers[0].until(lambda m: isinstance(m, Members) and [state_of(m, worker) for worker in workers] == ["ready"] * 2)
    tokenizer.push.send(admit())
    answer(workers[0], 41)
    workers[0].push.send(Goodbye())
    plan = answer(workers[1], 42)
    assert unpack_i32(plan.added[0].tokens).tolist() == [7, 8, 9, 41]
    answer(workers[1], 43)
    tokens, finished = [], []
    while not finished:
        batch = tokenizer.batch()
        tokens += unpack_i32(batch.tokens).tolist()
        finished += batch.finished
    assert tokens == [41, 42, 43]


def test_a_worker_of_another_model_is_shown_as_failed_and_may_come_in_when_the_others_have_gone(
    scheduler: subprocess.Popen, stage: Stage
) -> None:
    worker = stage.worker()
    worker.until(lambda m: isinstance(m, Members) and state_of(m, worker) == "ready")
    stranger = stage.worker(32, 1, msgspec.structs.replace(FACTS, name="other"))
    stranger.until(lambda m: isinstance(m, Members) and state_of(m, stranger) == "failed")
    stranger.push.send(Heartbeat("ready", 1))
    worker.push.send(Goodbye())
    stranger.until(lambda m: isinstance(m, Members) and m.model is None and state_of(m, stranger) == "failed")
    stranger.push.send(WorkerReady(msgspec.structs.replace(FACTS, name="other"), 8))
    members = stranger.until(lambda m: isinstance(m, Members) and state_of(m, stranger) == "ready")
    assert members.model.name == "other"


def test_a_groups_figures_are_those_of_its_worker(scheduler: subprocess.Popen, stage: Stage) -> None:
    tokenizer, worker, api = stage.tokenizer(), stage.worker(), stage.actor("api", 41, ToApi)
    api.join()
    tokenizer.push.send(admit())
    worker.next(StepPlan)

    def running(message: Any) -> bool:
        members = message.members if isinstance(message, Members) else []
        return any(m.peer.service == "worker" and m.counters.get("group_running") == 1 for m in members)

    api.until(running)
    others = tokenizer.until(lambda message: isinstance(message, Members))
    assert not any(member.counters for member in others.members)  # only API processes serve figures


def test_a_repeated_ready_changes_nothing(scheduler: subprocess.Popen, stage: Stage) -> None:
    tokenizer, worker = stage.tokenizer(), stage.worker()
    tokenizer.push.send(admit())
    answer(worker, 41)
    worker.push.send(WorkerReady(FACTS, 8))
    assert answer(worker, 42).added == []
    assert answer(worker, 43).added == []


def test_strangers_and_wrong_services_change_nothing(scheduler: subprocess.Popen, stage: Stage) -> None:
    tokenizer, worker = stage.tokenizer(), stage.worker()
    stranger = stage.actor("api", 77, ToTokenizer)
    stranger.push.send(admit(SEQ + 9))
    worker.push.send(admit(SEQ + 8))
    tokenizer.push.send(WorkerReady(FACTS, 8))
    tokenizer.push.send(admit())
    assert [row.seq_id for row in answer(worker, 1).added] == [SEQ]


def test_a_worker_that_breaks_the_protocol_is_given_up(scheduler: subprocess.Popen, stage: Stage) -> None:
    tokenizer, worker = stage.tokenizer(), stage.worker()
    tokenizer.push.send(admit())
    answer(worker, 5000)
    members = tokenizer.until(lambda m: isinstance(m, Members) and worker.peer.incarnation in m.departed)
    assert members.model is None
    successor = stage.worker(incarnation=32)
    assert unpack_i32(answer(successor, 1).added[0].tokens).tolist() == [7, 8, 9]


def test_status_and_story_answer_inside_the_run_directory_only(
    scheduler: subprocess.Popen, stage: Stage, tmp_path: Path
) -> None:
    tokenizer, worker = stage.tokenizer(), stage.worker()
    tokenizer.push.send(admit())
    worker.next(StepPlan)
    asker = stage.actor("admin", 55, ToAdmin)
    tokenizer.push.send(StatusQuery("ipc:///proc/self/x"))
    asker.push.send(StatusQuery(asker.inbox.endpoint))
    status = asker.next(Status)
    assert sorted(member.peer.service for member in status.members) == ["scheduler", "tokenizer", "worker"]
    assert (status.load.running, status.load.blocks_total, status.model) == (1, 32, FACTS)
    asker.push.send(StoryQuery(asker.inbox.endpoint, SEQ))
    assert "admitted" in "\n".join(asker.next(Story).lines)


def test_sequences_of_a_tokenizer_that_left_are_taken_over_or_given_up_by_their_api(
    scheduler: subprocess.Popen, stage: Stage
) -> None:
    tokenizer, worker, api = stage.tokenizer(), stage.worker(), stage.actor("api", 55, ToApi)
    api.join()
    tokenizer.push.send(admit(max_tokens=50))
    answer(worker, 1)
    tokenizer.push.send(Goodbye())
    worker.until(lambda m: isinstance(m, Members) and 21 in m.departed and m.load.running == 1)
    other = stage.actor("tokenizer", 22, ToTokenizer)
    other.join()
    other.push.send(msgspec.structs.replace(admit(max_tokens=50), seq_id=SEQ + 1, origin=SEQ))
    assert other.batch().seq_ids == pack_u64([SEQ + 1])
    api.push.send(Abort(SEQ))
    members = worker.until(lambda m: isinstance(m, Members) and 21 in m.departed and m.load.running == 0)
    assert members.load.blocks_free + members.load.blocks_cached == members.load.blocks_total


def test_refusals_reach_the_tokenizer(scheduler: subprocess.Popen, stage: Stage) -> None:
    tokenizer = stage.tokenizer()
    stage.worker()
    tokenizer.until(lambda m: isinstance(m, Members) and m.model is not None)
    tokenizer.push.send(Admit(SEQ, pack_i32([100]), Sampling(max_tokens=1)))
    refused = tokenizer.next(Refused)
    assert (refused.seq_id, refused.reason, refused.param) == (SEQ, "invalid", "prompt")


def test_garbage_is_counted_and_shown(scheduler: subprocess.Popen, stage: Stage) -> None:
    api = stage.actor("api", 41, ToApi)
    api.join()
    api.push.send(StepPlan(1))  # no message of this receiver
    members = api.until(lambda m: isinstance(m, Members) and m.members[0].counters.get("link_bad_frame") == 1)
    assert members.members[0].peer.service == "scheduler"


def test_sigterm_ends_it_well(scheduler: subprocess.Popen, stage: Stage, tmp_path: Path) -> None:
    stage.tokenizer()
    scheduler.send_signal(signal.SIGTERM)
    assert scheduler.wait(LIMIT_S) == 0
    assert not (tmp_path / "scheduler").exists()


@pytest.fixture
def second(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Scheduler 1 of two."""
    settings = [f"links.run_dir={tmp_path}", "links.heartbeat_s=0.05", "links.dead_after_s=60"]
    options = [f"--set={setting}" for setting in (*settings, "services.scheduler.replicas=2")]
    process = subprocess.Popen([sys.executable, "-m", "services.scheduler", "--instance=1", *options])
    yield process
    process.kill()
    process.wait()


def test_one_of_several_drains_until_tokenizers_have_moved_everything(
    second: subprocess.Popen, stage: Stage, tmp_path: Path
) -> None:
    stage.endpoint = f"ipc://{tmp_path}/scheduler-1"
    tokenizer, worker = stage.tokenizer(), stage.worker()
    tokenizer.push.send(admit(max_tokens=50))
    answer(worker, 1)
    second.send_signal(signal.SIGTERM)
    draining = tokenizer.until(lambda m: isinstance(m, Members) and m.members[0].state == "draining")
    assert (draining.members[0].peer.instance, draining.schedulers) == (1, 2)
    answer(worker, 2)
    assert second.poll() is None, "it goes on until all is taken from it"
    tokenizer.push.send(Abort(SEQ))
    assert second.wait(LIMIT_S) == 0


def test_the_number_of_schedulers_is_told_to_everybody(second: subprocess.Popen, stage: Stage, tmp_path: Path) -> None:
    stage.endpoint = f"ipc://{tmp_path}/scheduler-1"
    tokenizer, asker = stage.tokenizer(), stage.actor("admin", 55, ToAdmin)
    for count in (10**6, 0, 3):
        asker.push.send(Schedulers(count))
    members = tokenizer.until(lambda m: isinstance(m, Members) and m.schedulers != 2)
    assert members.schedulers == 3 and members.members[0].state == "ready"
    asker.push.send(Schedulers(1))
    tokenizer.until(lambda m: isinstance(m, Members) and m.schedulers == 1 and m.members[0].state == "draining")
    asker.push.send(StatusQuery(asker.inbox.endpoint))
    assert asker.next(Status).schedulers == 1


def test_what_an_administrator_asks_for_is_told_to_everybody(scheduler: subprocess.Popen, stage: Stage) -> None:
    tokenizer, api, worker = stage.tokenizer(), stage.actor("api", 44, ToApi), stage.worker()
    api.join()
    worker.push.send(Control(log_level="error"))

    api.push.send(Control(profile=True, flush=True))
    api.push.send(Control(log_level="debug"))
    told = tokenizer.until(lambda m: isinstance(m, Members) and m.log_level != "")
    assert (told.log_level, told.profile) == ("debug", True), "what was asked for before stays"
    api.push.send(Control(profile=False))
    told = tokenizer.until(lambda m: isinstance(m, Members) and not m.profile)
    assert told.log_level == "debug"


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A scheduler that gives a step three seconds, and a silent peer a minute."""
    settings = [f"links.run_dir={tmp_path}", "links.heartbeat_s=0.05", "links.dead_after_s=60"]
    settings += ["scheduler.step_deadline_s=3"]
    command = [sys.executable, "-m", "services.scheduler", *[f"--set={setting}" for setting in settings]]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def beating(actors: list[Actor], condition: Callable[[], bool]) -> None:
    """Beats for them until the condition holds."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        for actor in actors:
            actor.push.send(Heartbeat("ready", 0))
            actor.inbox.wait(0.02)
            actor.seen += actor.inbox.drain()


def test_a_worker_that_beats_but_does_not_answer_is_given_up_and_told(strict: subprocess.Popen, stage: Stage) -> None:
    tokenizer, worker = stage.tokenizer(), stage.worker()
    tokenizer.push.send(admit())

    def told() -> bool:
        return any(isinstance(m, Members) and worker.peer.incarnation in m.departed for _, m in worker.seen)

    beating([tokenizer, worker], told)
    # Its late result reaches nobody.
    worker.push.send(StepResult(1, pack_i32([99])))
    successor = stage.worker(incarnation=32)
    worker.push.send(StepResult(2, pack_i32([99])))
    plan = answer(successor, 42)
    assert unpack_i32(plan.added[0].tokens).tolist() == [7, 8, 9]
    assert unpack_i32(tokenizer.batch().tokens).tolist() == [42]
    status = stage.actor("admin", 55, ToAdmin)
    status.push.send(StatusQuery(status.inbox.endpoint))
    own = next(m for m in status.next(Status).members if m.peer.service == "scheduler")
    assert own.counters["stuck_steps"] >= 1, "the successor's next step has been waiting since"


def test_a_scheduler_that_was_stopped_itself_blames_nobody(tmp_path: Path) -> None:
    """What the others have sent meanwhile is read first: a timer may come before it."""
    config = load(None, [f"links.run_dir={tmp_path}", "scheduler.step_deadline_s=1"])

    async def main() -> None:
        now_s = 100.0
        process = Process("scheduler", 0, config)
        scheduler = SchedulerProcess(process, Fleet(config.scheduler, config.kv))
        scheduler._now_s = lambda: now_s  # type: ignore[method-assign]
        worker = Peer("worker", 0, 31, f"ipc://{tmp_path}/w")
        tokenizer = Peer("tokenizer", 0, 21, f"ipc://{tmp_path}/t")
        scheduler.receive([(peer.incarnation, Hello(peer, "hash")) for peer in (worker, tokenizer)])
        scheduler.receive([(31, WorkerReady(FACTS, 8)), (21, admit())])
        beats = [(31, Heartbeat("ready", 0)), (21, Heartbeat("ready", 0))]
        for _ in range(2):
            scheduler.beat()
        now_s += 3600.0
        scheduler.beat()
        scheduler.receive([*beats, (31, StepResult(1, pack_i32([41])))])
        now_s += 0.5
        scheduler.beat()
        assert not scheduler.registry.departed and scheduler.fleet.metrics()["output_tokens"] == 1
        # The same silence of others, while it ran itself.
        for _ in range(11):
            scheduler.receive(beats[1:])
            now_s += 0.5
            scheduler.beat()
        assert scheduler.registry.departed == {31} and scheduler.fleet.metrics()["stuck_steps"] == 1
        scheduler.inbox.close()
        for link in scheduler._links.values():
            link.close()

    asyncio.run(main())


def test_what_its_prefix_cache_holds_is_published(tmp_path: Path) -> None:
    """From the frames of peers to those of subscribers; off by default."""
    endpoint = f"ipc://{tmp_path}/events"
    config = load(None, [f"links.run_dir={tmp_path}", f"kv.events_endpoint={endpoint}", "kv.events_topic=kv"])
    process = Process("scheduler", 0, config)
    fleet = Fleet(config.scheduler, config.kv, 5)
    assert Fleet(config.scheduler, Kv(), 5).book.kv_log is None

    async def main() -> None:
        scheduler = SchedulerProcess(process, fleet)
        subscriber: Any = zmq.Context.instance().socket(zmq.SUB)
        subscriber.connect(endpoint)
        subscriber.subscribe(b"kv")
        worker, tokenizer = (
            Peer("worker", 0, 31, f"ipc://{tmp_path}/w"),
            Peer("tokenizer", 0, 21, f"ipc://{tmp_path}/t"),
        )
        scheduler.receive([(peer.incarnation, Hello(peer, "hash")) for peer in (worker, tokenizer)])
        scheduler.receive([(31, WorkerReady(FACTS, 8))])
        stored: list[Any] = []
        for number in range(1000):  # until the subscriber is there
            prompt = pack_i32([number % 90, 1, 2, 3, number // 90, 5])
            seq_id = make_seq_id(0, 0, 5, number)
            scheduler.receive([(21, Admit(seq_id, prompt, Sampling(max_tokens=1)))])
            scheduler.receive([(31, StepResult(number + 1, pack_i32([41])))])
            if subscriber.poll(20):
                stored = msgspec.msgpack.decode(subscriber.recv_multipart()[2])[1]
                break
        assert stored[0][0] == "BlockStored" and stored[0][3:5] == [[number % 90, 1, 2, 3], 4]
        assert scheduler.publisher
        subscriber.close(0)
        scheduler.publisher.close()
        scheduler.inbox.close()
        for link in scheduler._links.values():
            link.close()

    asyncio.run(main())
