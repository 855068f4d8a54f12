"""The tokenizer process on real sockets, in this process; the test plays the scheduler and the APIs."""

import asyncio
import contextlib
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.columns import pack_i32, pack_u64, unpack_i32
from common.config import Config, Links, Model
from common.errors import EXIT_CONFIG, ConfigError
from common.lifecycle import Process
from common.protocol import (
    Abort,
    Admit,
    Detokenize,
    Detokenized,
    Finished,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    Member,
    Members,
    ModelFacts,
    Peer,
    PromptKind,
    Refused,
    Sampling,
    State,
    Stop,
    Submit,
    TextBatch,
    TextFinished,
    ToApi,
    TokenBatch,
    Tokenize,
    Tokenized,
    ToScheduler,
    make_seq_id,
)
from common.transport import HEADER, AsyncInbox, LinkCounters, Push
from services.tokenizer import process as tokenizer_process
from services.tokenizer.encode import Encoder
from services.tokenizer.process import serve
from services.tokenizer.source import load

MODEL = ModelFacts("m", "llama", 49160, 200, (2,), 16, 100)
SAMPLING = Sampling(max_tokens=20)


class Actor:
    """A process that the test plays: an inbox whose messages are kept, and links to others."""

    def __init__(self, service: Any, instance: int, incarnation: int, endpoint: str, union: Any) -> None:
        self.seen: list[Any] = []
        self.news = asyncio.Event()
        self.inbox: AsyncInbox[Any] = AsyncInbox(endpoint, union, 1000, LinkCounters())
        self.peer = Peer(service, instance, incarnation, self.inbox.endpoint)
        self.inbox.start(self._receive)
        self.link: Push | None = None

    def _receive(self, batch: list[tuple[int, Any]]) -> None:
        self.seen += [message for _, message in batch]
        self.news.set()

    def connect(self, endpoint: str) -> None:
        self.link = Push(endpoint, self.peer.incarnation, 1000, LinkCounters())

    def send(self, message: msgspec.Struct) -> None:
        assert self.link is not None and self.link.send(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.seen if isinstance(message, kind)]

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Waits for messages until the condition holds; a test that waits for ever is ended by conftest."""
        while not (found := condition()):
            self.news.clear()
            await self.news.wait()
        return found

    async def first(self, kind: type) -> Any:
        return (await self.until(lambda: self.of(kind)))[0]

    def close(self) -> None:
        self.inbox.close()
        if self.link is not None:
            self.link.close()


class System:
    """One tokenizer under test with the scheduler, and APIs as needed."""

    def __init__(self, run_dir: Path, model: ModelFacts | None, drain_s: float, dead_after_s: float) -> None:
        links = Links(run_dir=str(run_dir), heartbeat_s=0.05, drain_s=drain_s, dead_after_s=dead_after_s)
        self.config = Config(links=links)
        self.process = Process("tokenizer", 0, self.config)
        self.actors: list[Actor] = []
        self.model = model
        self.scheduler = self.new_scheduler(1001)
        self.task = asyncio.ensure_future(serve(self.process))
        self.members: list[Peer] = []

    def new_scheduler(self, incarnation: int) -> Actor:
        self.scheduler = self._actor("scheduler", incarnation, 0, f"ipc://{self.config.run_dir}/scheduler", ToScheduler)
        return self.scheduler

    def _actor(self, service: str, incarnation: int, instance: int, endpoint: str, union: Any) -> Actor:
        actor = Actor(service, instance, incarnation, endpoint, union)
        self.actors.append(actor)
        return actor

    async def join(self) -> None:
        """Answers the tokenizer's Hello and waits until it is ready."""
        hello = await self.scheduler.first(Hello)
        self.endpoint = hello.peer.endpoint
        self.members.append(hello.peer)
        self.tell()
        await self.scheduler.until(lambda: [beat for beat in self.scheduler.of(Heartbeat) if beat.state == "ready"])

    def api(self, incarnation: int = 0x77770001, instance: int = 0) -> Actor:
        endpoint = f"ipc://{self.config.run_dir}/api-{incarnation:x}"
        actor = self._actor("api", incarnation, instance, endpoint, ToApi)
        actor.connect(self.endpoint)
        self.members.append(actor.peer)
        self.tell()
        return actor

    def tell(self, departed: tuple[int, ...] = ()) -> None:
        """The scheduler sends everybody the members."""
        if self.scheduler.link is None:
            self.scheduler.connect(self.endpoint)
        state: State = "ready"
        members = [Member(peer, state) for peer in (self.scheduler.peer, *self.members)]
        self.scheduler.send(Members(members, list(departed), Load(), self.model))

    def leave(self, actor: Actor) -> None:
        self.members.remove(actor.peer)
        self.tell((actor.peer.incarnation,))

    def tokens(self, seq_id: int, first: int, tokens: list[int], finished: list[Finished] | None = None) -> None:
        index = range(first, first + len(tokens))
        batch = TokenBatch(pack_u64([seq_id] * len(tokens)), pack_i32(index), pack_i32(tokens), finished or [])
        self.scheduler.send(batch)

    async def beats(self) -> Heartbeat:
        """The next heartbeat but one: it was made after everything sent so far arrived."""
        count = len(self.scheduler.of(Heartbeat))
        await self.scheduler.until(lambda: len(self.scheduler.of(Heartbeat)) >= count + 2)
        return self.scheduler.of(Heartbeat)[-1]


def run(
    scenario: Callable[[System], Coroutine[Any, Any, None]],
    run_dir: Path,
    model: ModelFacts | None = MODEL,
    drain_s: float = 0.01,
    dead_after_s: float = 5.0,
) -> None:
    @contextlib.asynccontextmanager
    async def system() -> AsyncIterator[System]:
        made = System(run_dir, model, drain_s, dead_after_s)
        try:
            await made.join()
            yield made
        finally:
            made.process.stopping.set()
            await asyncio.gather(made.task, return_exceptions=True)
            for actor in made.actors:
                actor.close()

    async def main() -> None:
        async with system() as made:
            await scenario(made)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch, bundled: Any) -> None:
    """The real tokenizer, loaded once for all tests."""
    monkeypatch.setattr(tokenizer_process, "load", lambda model, make_template: bundled)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> "Gate":
    return Gate(monkeypatch)


class Gate:
    """Holds every encode in the pool, or those with a certain text, until the test opens it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.count = 0
        self.text = ""
        real = Encoder.prompt

        def prompt(encoder: Encoder, submit: Submit, vocab_size: int) -> Any:
            self.count += 1
            self.entered.set()
            if self.text in submit.text:
                self.opened.wait()
            return real(encoder, submit, vocab_size)

        monkeypatch.setattr(Encoder, "prompt", prompt)


def seq(api: Actor, counter: int = 0) -> int:
    return make_seq_id(api.peer.instance, 0, api.peer.incarnation, counter)


def text(seq_id: int, prompt: str = "The capital of France is", **fields: Any) -> Submit:
    return Submit(seq_id, PromptKind.TEXT, fields.pop("sampling", SAMPLING), text=prompt, **fields)


def test_from_submit_to_text(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        api.send(text(seq(api), priority=2))
        admit = await system.scheduler.first(Admit)
        assert admit == Admit(seq(api), pack_i32([504, 3575, 282, 4649, 314]), SAMPLING, 1, 2)
        system.tokens(seq(api), 0, [7042, 30])
        system.tokens(seq(api), 2, [2], [Finished(seq(api), FinishReason.EOS, 2, cached_tokens=3)])
        await api.until(lambda: [batch for batch in api.of(TextBatch) if batch.finished])
        assert "".join(piece for batch in api.of(TextBatch) for piece in batch.texts) == " Paris."
        assert sum(sum(unpack_i32(batch.counts)) for batch in api.of(TextBatch)) == 3
        [finished] = api.of(TextBatch)[-1].finished
        assert finished == TextFinished(seq(api), FinishReason.EOS, 5, 3, 3, stop_token=2)
        beat = await system.beats()
        assert beat.progress >= 3
        expected = {"open_requests": 0, "requests": 1, "prompt_tokens": 5, "cached_tokens": 3, "output_tokens": 3}
        assert {name: beat.counters[name] for name in expected} == expected

    run(scenario, run_dir)


def test_chat_and_token_prompts(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        api.send(Submit(seq(api), PromptKind.CHAT, Sampling(0), messages=b'[{"role": "user", "content": "Hi"}]'))
        admit = await system.scheduler.first(Admit)
        assert admit.tokens[:8] == pack_i32([1, 9690])
        assert admit.sampling.max_tokens == 200 - len(admit.tokens) // 4
        api.send(Submit(seq(api, 1), PromptKind.TOKENS, SAMPLING, tokens=pack_i32([49159])))
        await system.scheduler.until(lambda: len(system.scheduler.of(Admit)) == 2)

    run(scenario, run_dir)


def test_tokens_of_others_pass_a_prompt_that_is_being_encoded(run_dir: Path, gate: Gate) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        gate.opened.set()
        api.send(text(seq(api)))
        await system.scheduler.first(Admit)
        gate.opened.clear()
        gate.entered.clear()
        api.send(text(seq(api, 1), "a long prompt"))
        await asyncio.to_thread(gate.entered.wait)
        system.tokens(seq(api), 0, [7042])
        assert (await api.first(TextBatch)).texts == [" Paris"]
        assert len(system.scheduler.of(Admit)) == 1, "the long prompt is still being encoded"
        gate.opened.set()
        await system.scheduler.until(lambda: len(system.scheduler.of(Admit)) == 2)

    run(scenario, run_dir)


def test_short_prompts_pass_a_long_one(run_dir: Path, gate: Gate) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        gate.text = "long"
        api.send(text(seq(api), "long " * 20_000))
        await asyncio.to_thread(gate.entered.wait)
        api.send(text(seq(api, 1)))
        assert (await system.scheduler.first(Admit)).seq_id == seq(api, 1)
        gate.opened.set()
        assert (await api.first(Refused)).reason == "too_long"

    run(scenario, run_dir)


def test_abort_while_the_prompt_is_encoded(run_dir: Path, gate: Gate) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        api.send(text(seq(api), n=2))
        await asyncio.to_thread(gate.entered.wait)
        api.send(text(seq(api, 2), "waits for the only thread"))
        for counter in (0, 1, 1, 2):
            api.send(Abort(seq(api, counter)))
        await api.until(lambda: sum(len(batch.finished) for batch in api.of(TextBatch)) >= 3)
        gate.opened.set()
        api.send(text(seq(api, 3), "next"))
        admit = await system.scheduler.first(Admit)
        assert admit.seq_id == seq(api, 3), "neither of the aborted requests was admitted"
        assert gate.count == 2, "an encode that had not begun was never made"
        await system.beats()
        ends = [end for batch in api.of(TextBatch) for end in batch.finished]
        assert sorted((end.seq_id, end.reason) for end in ends) == [
            (seq(api, counter), FinishReason.ABORT) for counter in range(3)
        ]
        assert system.scheduler.of(Abort) == []

    run(scenario, run_dir)


def test_abort_in_the_same_batch_comes_before_the_encode(run_dir: Path, gate: Gate) -> None:
    """Both frames lie in the socket before the service looks: the request is over before a thread sees it."""

    async def scenario(system: System) -> None:
        api = system.api()
        gate.opened.set()
        for _ in range(100):
            api.send(text(seq(api)))
            api.send(Abort(seq(api)))
        await api.first(TextBatch)
        await system.beats()
        ends = [end for batch in api.of(TextBatch) for end in batch.finished]
        assert len(ends) == 100 and {end.reason for end in ends} == {FinishReason.ABORT}
        assert gate.count < 100 and len(system.scheduler.of(Admit)) == len(system.scheduler.of(Abort))

    run(scenario, run_dir)


def test_abort_of_a_running_sequence(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        api.send(text(seq(api)))
        await system.scheduler.first(Admit)
        api.send(Abort(seq(api)))
        assert await system.scheduler.first(Abort) == Abort(seq(api))
        batch = await api.first(TextBatch)
        assert [(end.reason, end.prompt_tokens) for end in batch.finished] == [(FinishReason.ABORT, 5)]

    run(scenario, run_dir)


def test_nobody_aborts_what_another_api_has_asked_for(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api, stranger = system.api(), system.api(0x77770002, 1)
        api.send(text(seq(api)))
        await system.scheduler.first(Admit)
        stranger.send(Abort(seq(api)))
        stranger.send(Tokenize(seq(stranger), PromptKind.TEXT, "x"))
        await stranger.first(Tokenized)
        system.tokens(seq(api), 0, [2], [Finished(seq(api), FinishReason.EOS, 2)])
        await api.until(lambda: [batch for batch in api.of(TextBatch) if batch.finished])
        assert [end.reason for end in api.of(TextBatch)[-1].finished] == [FinishReason.EOS]
        assert not system.scheduler.of(Abort)

    run(scenario, run_dir)


def test_requests_under_the_name_of_another_service_do_not_stay(run_dir: Path) -> None:
    """No API leaves with whom they would go, and the scheduler drops those of an instance without a word."""

    async def scenario(system: System) -> None:
        worker = system.api()
        worker.peer = Peer("worker", 0, worker.peer.incarnation, worker.peer.endpoint)
        system.members[-1] = worker.peer
        system.tell()
        worker.send(text(seq(worker)))
        await system.scheduler.first(Admit)
        while not system.scheduler.of(Abort):
            system.tell()
            await asyncio.sleep(0.02)
        assert (await system.beats()).counters["open_requests"] == 0

    run(scenario, run_dir, dead_after_s=0.3)


def test_stop_string_stops_the_scheduler(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        api.send(text(seq(api), stop=("is.",)))
        await system.scheduler.first(Admit)
        system.tokens(seq(api), 0, [7042, 30, 30])
        assert await system.scheduler.first(Stop) == Stop(seq(api))
        await api.until(lambda: [batch for batch in api.of(TextBatch) if batch.finished])
        assert "".join(piece for batch in api.of(TextBatch) for piece in batch.texts) == " Par"
        end = api.of(TextBatch)[-1].finished[0]
        assert (end.reason, end.stop_string, end.output_tokens) == (FinishReason.STOP_STRING, "is.", 2)

    run(scenario, run_dir)


def test_requests_that_are_refused(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        refused = [
            (text(seq(api, 0), ""), "invalid", "empty", "prompt"),
            (text(seq(api, 1), "many words " * 200), "too_long", "200 tokens", "prompt"),
            (text(seq(api, 2), sampling=Sampling(196)), "too_long", "201 tokens", "max_tokens"),
            (Submit(seq(api, 3), PromptKind.TOKENS, SAMPLING, tokens=pack_i32([49160])), "invalid", "49160", "prompt"),
            (Submit(seq(api, 4), PromptKind.CHAT, SAMPLING, messages=b"?"), "invalid", "list of objects", "messages"),
            (Submit(seq(api, 5), PromptKind.CHAT, SAMPLING, messages=b"[{}]"), "invalid", "role", "messages"),
        ]
        for n in (0, 10**12):
            api.send(text(seq(api, 9), n=n))
        await api.until(lambda: [answer.param for answer in api.of(Refused)] == ["n", "n"])
        api.seen.clear()
        for submit, *_ in refused:
            api.send(submit)
        await api.until(lambda: len(api.of(Refused)) == len(refused))
        answers = {answer.seq_id: answer for answer in api.of(Refused)}  # chats and texts have pools of their own
        for submit, reason, words, param in refused:
            answer = answers[submit.seq_id]
            assert (answer.reason, answer.param) == (reason, param)
            assert words in answer.message
        beat = await system.beats()
        assert beat.counters["refused"] == 6 and beat.counters["open_requests"] == 0

    run(scenario, run_dir)


def test_no_model_yet(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        api.send(text(seq(api)))
        answer = await api.first(Refused)
        assert answer.reason == "unavailable" and system.scheduler.of(Admit) == []
        system.model = MODEL
        system.tell()
        api.send(text(seq(api, 1)))
        await system.scheduler.first(Admit)

    run(scenario, run_dir, model=None)


def test_the_scheduler_refuses(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        api.send(text(seq(api)))
        await system.scheduler.first(Admit)
        system.scheduler.send(Refused(seq(api), "overloaded", "too many"))
        assert await api.first(Refused) == Refused(seq(api), "overloaded", "too many")

    run(scenario, run_dir)


def test_tokenize_and_detokenize(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        api.send(Tokenize(seq(api), PromptKind.TEXT, text=" 42"))
        assert await api.first(Tokenized) == Tokenized(seq(api), pack_i32([216, 36, 34]), ["Ġ", "4", "2"])
        api.send(Detokenize(seq(api, 1), pack_i32([216, 36, 34])))
        assert await api.first(Detokenized) == Detokenized(seq(api, 1), " 42")
        api.send(Detokenize(seq(api, 2), pack_i32([-5])))
        answer = await api.first(Refused)
        assert (answer.seq_id, answer.reason, answer.param) == (seq(api, 2), "invalid", "tokens")

    run(scenario, run_dir)


def test_fault_of_an_encode_is_one_request_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(encoder: Encoder, submit: Submit, vocab_size: int) -> Any:
        raise RuntimeError("boom")

    async def scenario(system: System) -> None:
        api = system.api()
        with monkeypatch.context() as patched:
            patched.setattr(Encoder, "prompt", broken)
            api.send(text(seq(api)))
            answer = await api.first(Refused)
        assert answer.reason == "internal" and "boom" not in answer.message
        api.send(text(seq(api, 1)))
        await system.scheduler.first(Admit)

    run(scenario, run_dir)


def test_frames_that_are_not_ours(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        assert api.link is not None
        raw = api.link._socket
        raw.send(b"garbage")
        raw.send(HEADER.pack(b"VL", 99, api.peer.incarnation) + b"\x90")
        raw.send(HEADER.pack(b"VL", 1, api.peer.incarnation) + b"\xff\xff")
        stranger = text(make_seq_id(0, 0, 0x4444, 0))
        api.send(stranger)
        api.send(Abort(12345))
        api.send(TokenBatch(pack_u64([1]), pack_i32([0]), pack_i32([0]), []))
        api.send(text(seq(api)))
        await system.scheduler.first(Admit)
        beat = await system.beats()
        assert beat.counters["link_bad_frame"] == 2 and beat.counters["link_bad_version"] == 1
        assert beat.counters["unknown_results"] == 2 and beat.counters["requests"] == 1

    run(scenario, run_dir)


def test_an_api_that_has_gone(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        gone, stays = system.api(), system.api(0x77770002, 1)
        gone.send(text(seq(gone)))
        await system.scheduler.first(Admit)
        stays.send(text(seq(stays)))
        await system.scheduler.until(lambda: len(system.scheduler.of(Admit)) == 2)
        system.leave(gone)
        assert await system.scheduler.first(Abort) == Abort(seq(gone))
        reborn = system.api(0x88880003, 0)
        reborn.send(text(seq(reborn)))
        await system.scheduler.until(lambda: len(system.scheduler.of(Admit)) == 3)
        system.tokens(seq(gone), 0, [7042])
        system.tokens(seq(stays), 0, [30])
        system.tokens(seq(reborn), 0, [7042])
        assert (await stays.first(TextBatch)).texts == ["."]
        assert (await reborn.first(TextBatch)).texts == [" Paris"]
        assert gone.of(TextBatch) == []

    run(scenario, run_dir)


def test_a_submit_that_is_faster_than_the_news_of_its_api(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        known = system.api()
        early = system._actor("api", 0x99990004, 2, f"ipc://{system.config.run_dir}/early", ToApi)
        early.connect(system.endpoint)
        early.send(text(seq(early), ""))
        await system.beats()
        assert early.seen == [] and known.seen == []
        system.members.append(early.peer)
        system.tell()
        assert (await early.first(Refused)).seq_id == seq(early)

    run(scenario, run_dir)


def test_a_scheduler_that_was_replaced(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        api.send(text(seq(api), n=2, sampling=Sampling(20, seed=7)))
        await system.scheduler.first(Admit)
        system.tokens(seq(api, 1), 0, [7042])
        await api.first(TextBatch)
        old = system.scheduler
        old.inbox.close()
        system.new_scheduler(1002)
        system.model = None
        system.tell((old.peer.incarnation,))
        await system.scheduler.until(lambda: len(system.scheduler.of(Admit)) == 2)
        prompt = pack_i32([504, 3575, 282, 4649, 314])
        assert sorted(system.scheduler.of(Admit), key=lambda admit: admit.seq_id) == [
            Admit(seq(api, 0), prompt, Sampling(20, seed=7), again=True),
            Admit(seq(api, 1), prompt, Sampling(20, seed=8), output=pack_i32([7042]), again=True),
        ]
        old.send(TokenBatch(pack_u64([seq(api, 1)]), pack_i32([1]), pack_i32([31]), []))
        system.tokens(seq(api, 1), 1, [30])
        await api.until(lambda: len(api.of(TextBatch)) == 2)
        assert api.of(TextBatch)[1].texts == ["."]
        api.send(text(seq(api, 5)))
        await system.scheduler.until(lambda: len(system.scheduler.of(Admit)) == 3)

    run(scenario, run_dir)


def test_drain_waits_for_what_is_open(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        api.send(text(seq(api)))
        await system.scheduler.first(Admit)
        system.process.stopping.set()
        await system.scheduler.until(lambda: [b for b in system.scheduler.of(Heartbeat) if b.state == "draining"])
        system.tokens(seq(api), 0, [7042])
        assert (await api.first(TextBatch)).texts == [" Paris"]
        assert system.scheduler.of(Goodbye) == [] and not system.task.done()
        system.tokens(seq(api), 1, [2], [Finished(seq(api), FinishReason.EOS, 2)])
        await system.scheduler.first(Goodbye)
        await system.task

    run(scenario, run_dir, drain_s=60.0)


def test_drain_leaves_what_does_not_end_to_another_tokenizer(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api = system.api()
        api.send(text(seq(api)))
        await system.scheduler.first(Admit)
        system.process.stopping.set()
        await system.scheduler.first(Goodbye)
        await system.task
        assert api.of(TextBatch) == [] and system.scheduler.of(Abort) == []

    run(scenario, run_dir)


def test_a_text_that_does_not_end_is_told_though_others_go_on(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool whose work stands still stalls the process; the other one's progress does not hide it."""
    release = threading.Event()
    real = Encoder.prompt

    def prompt(self: Encoder, submit: Submit, vocab_size: int) -> Any:
        if len(submit.text) > 100_000:
            release.wait()
        return real(self, submit, vocab_size)

    monkeypatch.setattr(Encoder, "prompt", prompt)

    async def scenario(system: System) -> None:
        api = system.api()
        api.send(msgspec.structs.replace(text(seq(api)), text="x " * 60_000))

        def stalled_s() -> float:
            return max((beat.counters["stalled_seconds"] for beat in system.scheduler.of(Heartbeat)), default=0.0)

        try:
            for number in itertools.count(1):
                api.send(text(seq(api, number)))
                await system.scheduler.until(lambda sent=number: len(system.scheduler.of(Admit)) == sent)
                if stalled_s() > 0.5:
                    break
        finally:
            release.set()  # else the process could not end
        await api.until(lambda: api.of(Refused))
        system.scheduler.seen.clear()
        await system.scheduler.until(lambda: [b for b in system.scheduler.of(Heartbeat) if not b.counters["work_owed"]])
        assert system.scheduler.of(Heartbeat)[-1].counters["stalled_seconds"] == 0.0

    run(scenario, run_dir)


def settings(run_dir: Path) -> list[str]:
    return [sys.executable, "-m", "services.tokenizer", "--set", f"links.run_dir={run_dir}"]


def test_the_process_ends_cleanly_on_sigterm(run_dir: Path) -> None:
    process = subprocess.Popen(settings(run_dir), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "ready:" not in (line := process.stderr.readline()):
        assert line, "it ended"
    process.terminate()
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in rest


def test_a_model_that_is_none_is_a_configuration_error(run_dir: Path) -> None:
    command = [*settings(run_dir), "--set", f"model.source={run_dir}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == EXIT_CONFIG and "Traceback" not in done.stderr


def test_model_without_tokenizer_ends_the_process(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "load", load)
    config = Config(links=Links(run_dir=str(run_dir)), model=Model(source=str(run_dir)))

    async def main() -> None:
        await serve(Process("tokenizer", 0, config))

    with pytest.raises(ConfigError, match=r"neither config\.json nor a \.gguf file"):
        asyncio.run(main())


def second_scheduler(system: System, number: int = 2001) -> Actor:
    endpoint = f"ipc://{system.config.run_dir}/scheduler-1"
    actor = system._actor("scheduler", number, 1, endpoint, ToScheduler)
    actor.connect(system.endpoint)
    return actor


def speak(system: System, second: Actor, state: State = "ready", load: Load = Load()) -> None:  # noqa: B008
    members = [Member(second.peer, state), *(Member(peer, "ready") for peer in system.members)]
    second.send(Members(members, [], load, MODEL, schedulers=2))


def test_requests_go_to_the_emptier_scheduler_and_leave_one_that_drains(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api, first, second = system.api(), system.scheduler, second_scheduler(system)
        speak(system, second, load=Load(running=9))
        await second.first(Hello)
        speak(system, second, load=Load(running=9))
        await system.beats()
        system.tell()
        speak(system, second, load=Load(running=9))
        api.send(text(seq(api)))
        assert (await first.first(Admit)).seq_id == seq(api) and not second.of(Admit)
        system.tokens(seq(api), 0, [7042])
        assert (await api.first(TextBatch)).texts == [" Paris"]
        own = Member(first.peer, "draining")
        first.send(Members([own, *(Member(peer, "ready") for peer in system.members)], [], Load(), MODEL))
        admit = await second.first(Admit)
        assert admit.again and admit.output == pack_i32([7042])
        assert await first.first(Abort) == Abort(seq(api))
        system.tokens(seq(api), 1, [31])  # it still ran there
        batch = TokenBatch(pack_u64([seq(api)]), pack_i32([1]), pack_i32([30]), [])
        second.send(batch)
        await api.until(lambda: sum(len(batch.texts) for batch in api.of(TextBatch)) == 2)
        assert api.of(TextBatch)[-1].texts == ["."]

    run(scenario, run_dir)


def test_requests_of_a_scheduler_that_stays_away_move(run_dir: Path) -> None:
    async def scenario(system: System) -> None:
        api, first = system.api(), system.scheduler
        api.send(text(seq(api)))
        await first.first(Admit)
        second = second_scheduler(system)
        speak(system, second)
        await second.first(Hello)
        while not second.of(Admit):  # the first is silent from now on
            speak(system, second)
            await asyncio.sleep(0.02)
        assert second.of(Admit)[0].again and not first.of(Abort)
        system.tell()
        assert await first.first(Abort) == Abort(seq(api))

    run(scenario, run_dir, dead_after_s=0.5)
