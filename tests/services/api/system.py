"""A scheduler and tokenizers that do what a test says, on real sockets, around the real API process."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import uvloop

from common import config as configuration
from common.columns import pack_i32, pack_u64, unpack_i32
from common.lifecycle import Process
from common.protocol import (
    Abort,
    Control,
    Describe,
    Detokenize,
    Detokenized,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    Member,
    Members,
    ModelFacts,
    Pause,
    Peer,
    PromptKind,
    Refused,
    Sampling,
    Submit,
    TextBatch,
    TextFinished,
    Tokenize,
    Tokenized,
    ToScheduler,
    ToTokenizer,
)
from common.transport import AsyncInbox, LinkCounters, Push, new_incarnation, scheduler_endpoint
from services.api.gateway import Gateway
from services.api.listener import listen
from services.api.process import admin_listener, run

FACTS = ModelFacts("tiny", "llama", 1000, 128, (2,), 16, 64)
LIMIT_S = 120


def rows(*items: tuple[int, int, int, str], finished: tuple[TextFinished, ...] = ()) -> TextBatch:
    """A TextBatch of (seq_id, first_index, count, text) rows."""
    return TextBatch(
        pack_u64(item[0] for item in items),
        pack_i32(item[1] for item in items),
        pack_i32(item[2] for item in items),
        [item[3] for item in items],
        list(finished),
    )


class FakeTokenizer:
    """Records what the API sends. `on_submit` answers; by default with " t0 t1 ..." up to max_tokens or 3 tokens."""

    def __init__(self, system: "System", instance: int) -> None:
        self.system = system
        self.incarnation = new_incarnation()
        self.counters = LinkCounters()
        endpoint = f"ipc://{system.run_dir}/tokenizer-{instance}.{self.incarnation:x}"
        self.inbox: AsyncInbox[ToTokenizer] = AsyncInbox(endpoint, ToTokenizer, 1000, self.counters)
        self.peer = Peer("tokenizer", instance, self.incarnation, self.inbox.endpoint)
        self.submits: list[Submit] = []
        self.aborts: list[int] = []
        self.on_submit: Callable[[Submit], None] = self.answer
        self.inbox.start(self._receive)

    def _receive(self, batch: list[tuple[int, ToTokenizer]]) -> None:
        for _, message in batch:
            if isinstance(message, Submit):
                self.submits.append(message)
                self.on_submit(message)
            elif isinstance(message, Abort):
                self.aborts.append(message.seq_id)
            elif isinstance(message, Tokenize):
                asked = message.submit or message
                text = asked.text or asked.messages.decode()
                ids = pack_i32(map(ord, text)) if text or not message.submit else message.submit.tokens
                self.send(Tokenized(message.call_id, ids, [] if message.submit else list(text)))
            elif isinstance(message, Describe):
                self.send(Detokenized(message.call_id, '{"eos_token":"</s>"}'))
            elif isinstance(message, Detokenize):
                self.send(Detokenized(message.call_id, "".join(map(chr, unpack_i32(message.tokens)))))
        self.system.changed()

    def send(self, message: Any) -> None:
        assert self.system.to_api(self.incarnation).send(message)

    def answer(self, submit: Submit) -> None:
        count = submit.sampling.max_tokens or 3
        for seq_id in range(submit.seq_id, submit.seq_id + submit.n):
            for index in range(count):
                self.send(rows((seq_id, index, 1, f" t{index}")))
            self.finish(seq_id, count)

    def finish(self, seq_id: int, count: int, reason: FinishReason = FinishReason.LENGTH, **more: Any) -> None:
        self.send(rows(finished=(TextFinished(seq_id, reason, 7, count, 4, **more),)))

    def refuse(self, submit: Submit, reason: str, message: str, param: str | None = None) -> None:
        self.send(Refused(submit.seq_id, reason, message, param))


class System:
    """`url` is the API's. The scheduler here lists whoever said Hello, plus `tokenizers`, with `facts`."""

    def __init__(self, settings: list[str]) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="va-"))
        own = [f"links.run_dir={self.run_dir}", f"api.storage_dir={self.run_dir}/storage", "links.heartbeat_s=0.05"]
        self.config = configuration.load(None, [*own, *settings])
        self.facts: ModelFacts | None = FACTS
        self.load = Load(running=3, waiting=2, blocks_total=10, blocks_free=5, blocks_cached=1)
        self.incarnation = new_incarnation()
        self.counters = LinkCounters()
        self.inbox: AsyncInbox[ToScheduler] = AsyncInbox(
            scheduler_endpoint(self.config), ToScheduler, 1000, self.counters
        )
        self.tokenizers: list[FakeTokenizer] = []
        self._removed: list[FakeTokenizer] = []
        self.members: dict[int, Member] = {}
        self.departed: list[int] = []
        self.goodbyes = 0
        self.pauses: list[Pause] = []
        self.controls: list[Control] = []
        self._links: dict[tuple[int, int], Push] = {}
        self._change = asyncio.Event()
        self.process = Process("api", 1, self.config)
        self.gateway = Gateway(self.process)
        self.listener = listen("127.0.0.1", 0, self.run_dir)
        self.url = self.listener.url
        self.admin = admin_listener(self.process)

    def start(self) -> "asyncio.Task[None]":
        self.inbox.start(self._receive)
        return asyncio.create_task(run(self.process, self.gateway, self.listener, self.admin))

    def changed(self) -> None:
        self._change.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for messages until the condition holds."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._change.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._change.wait(), 0.02)

    def tokenizer(self, instance: int = 0) -> FakeTokenizer:
        self.tokenizers.append(FakeTokenizer(self, instance))
        self.tell()
        return self.tokenizers[-1]

    def remove(self, tokenizer: FakeTokenizer) -> None:
        """The scheduler declares it dead."""
        self.tokenizers.remove(tokenizer)
        self._removed.append(tokenizer)
        self.departed.append(tokenizer.incarnation)
        self.tell()

    def tell(self) -> None:
        """Members to the API."""
        others = [Member(t.peer, "ready", 1, None, {"requests": 5.0}) for t in self.tokenizers]
        own = Member(Peer("scheduler", 0, self.incarnation, self.inbox.endpoint), "ready")
        message = Members([own, *self.members.values(), *others], self.departed, self.load, self.facts)
        for member in self.members.values():
            self._link(self.incarnation, member.peer).send(message)

    def to_api(self, sender: int) -> Push:
        member = next(m for m in self.members.values() if m.peer.service == "api")
        return self._link(sender, member.peer)

    def _link(self, sender: int, peer: Peer) -> Push:
        key = sender, peer.incarnation
        if key not in self._links:
            self._links[key] = Push(peer.endpoint, sender, 10_000, self.counters)
        return self._links[key]

    def _receive(self, batch: list[tuple[int, ToScheduler]]) -> None:
        for sender, message in batch:
            if isinstance(message, Hello):
                self.members[sender] = Member(message.peer, "starting")
                self.tell()
            elif isinstance(message, Heartbeat) and sender in self.members:
                peer = self.members[sender].peer
                self.members[sender] = Member(
                    peer, message.state, message.progress, None, message.counters, message.histograms
                )
                self.tell()
            elif isinstance(message, Pause):
                self.pauses.append(message)
            elif isinstance(message, Control):
                self.controls.append(message)
            elif isinstance(message, Goodbye):
                self.goodbyes += 1
        self.changed()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        for tokenizer in self.tokenizers + self._removed:
            tokenizer.inbox.close()
        self.inbox.close()
        shutil.rmtree(self.run_dir)


@contextlib.asynccontextmanager
async def running(*settings: str, tokenizers: int = 1) -> AsyncIterator[tuple[System, httpx.AsyncClient]]:
    """The API on a free port, with a ready system behind it unless `tokenizers` is 0."""
    system = System(list(settings))
    serving = system.start()
    try:
        for instance in range(tokenizers):
            system.tokenizer(instance)
        await system.until(lambda: system.gateway.node.joined and bool(system.members))
        if tokenizers:
            await system.until(lambda: not system.gateway.missing())
        async with httpx.AsyncClient(base_url=system.url, timeout=LIMIT_S) as client:
            yield system, client
    finally:
        system.process.stopping.set()
        await asyncio.wait_for(serving, LIMIT_S)
        system.close()


def scenario(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs one test on the loop that the service uses."""
    uvloop.run(main())


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}
SUBMIT = Submit(0, PromptKind.TEXT, Sampling(16), text="x")
