import asyncio
import threading
from concurrent.futures import Future

from common.protocol import PromptKind
from common.pulse import STALLED, Pulses
from services.tokenizer.jobs import LONG_BYTES, Jobs


def test_long_texts_and_chats_do_not_stand_in_others_way() -> None:
    async def main() -> None:
        done: list[str] = []
        ended = asyncio.Event()
        pulses = Pulses(3.0)
        jobs = Jobs(1, pulses, ended.set)
        gate = threading.Event()

        def answer(job: "Future[str]") -> None:
            done.append(job.result())

        def hold() -> str:
            gate.wait()
            return "held"

        assert jobs.start(1, jobs.lane_for(LONG_BYTES, PromptKind.TEXT), hold, answer)
        assert jobs.start(2, jobs.lane_for(10, PromptKind.CHAT), hold, answer)
        assert jobs.start(3, jobs.lane_for(10, PromptKind.TEXT), lambda: "short", answer)
        assert not jobs.start(1, jobs.short, lambda: "a repeat", answer)
        await ended.wait()
        assert done == ["short"] and len(jobs) == 2
        pulses.figures(0.0)
        assert pulses.figures(1.0)[STALLED] == 1.0, "one lane stands still"
        assert jobs.start(4, jobs.lane_for(10, PromptKind.CHAT), lambda: "cancelled", answer)
        jobs.cancel(4)
        jobs.cancel(99)
        gate.set()
        while len(jobs):
            ended.clear()
            await asyncio.wait_for(ended.wait(), 60) if len(jobs) else None
        assert sorted(done) == ["held", "held", "short"]
        jobs.close()

    asyncio.run(main())


def test_nothing_comes_back_after_the_close() -> None:
    async def main() -> None:
        done: list[object] = []
        jobs = Jobs(1, Pulses(3.0), lambda: done.append("after"))
        jobs.start(1, jobs.short, lambda: None, done.append)
        jobs.close()
        while len(jobs):
            await asyncio.sleep(0)
        assert done == []

    asyncio.run(main())
