"""Records of tokens and of prompts: whose they are, that none is lost or doubled, and what is no answer to the plan."""

from typing import Any

import msgspec
import pytest

from common.columns import pack_i32, unpack_i32
from common.logprobs import Report, StepLogprobs, record_bytes
from common.protocol import Abort, Admit, Sampling, StepPlan, StepResult, make_seq_id
from services.scheduler.events import Effect, SendTokens, TokenizerLost, WorkerLost
from tests.services.scheduler.harness import Harness, ids

OLD, NEW = make_seq_id(0, 0, 9, 500), make_seq_id(0, 1, 9, 501)


def record(token: int, top: int) -> bytes:
    """Tells which token it is of."""
    return pack_i32([token] * (record_bytes(top) // 4))


class Reporting(Harness):
    """The worker's records, and what tokenizers got: by sequence, output and prompt."""

    def __init__(self, drafts: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.facts = msgspec.structs.replace(self.facts, drafts=drafts, draft_rows=16)
        self.rows: dict[int, tuple[Report, list[int]]] = {}  # by slot: its prompt
        self.output: dict[int, bytes] = {}
        self.prompt: dict[int, bytes] = {}
        self.reports: dict[int, Report] = {}  # by sequence
        self.number = 50
        self.ready()

    def result(self, failed: tuple[int, ...] = ()) -> StepResult:
        """The oldest plan's: each token is another one, all drafts but one hold."""
        plan = self.plans.pop(0)
        for row in plan.added:
            tokens = list(unpack_i32(row.tokens))[: row.num_prompt]
            self.rows[row.slot] = row.sampling.report, tokens
        tokens: list[int] = []
        counts, records, prompts = bytearray(), b"", {}
        columns = (unpack_i32(column) for column in (plan.slots, plan.positions, plan.counts))
        for place, (slot, position, count, samples) in enumerate(zip(*columns, plan.samples, strict=True)):
            report, prompt = self.rows[slot]
            if samples:
                kept = max(count - 1, 1) if place < plan.drafting else 1
                own = [self.number + number for number in range(kept)]
                self.number = 50 + (self.number - 50 + kept) % 40
                tokens += own
                counts.append(kept)
                if place not in failed:
                    records += b"".join(record(token, report.top) for token in own if report.top >= 0)
            targets = prompt[position + 1 : position + 1 + count] if place >= plan.drafting else []
            if report.prompt >= 0 and targets:
                prompts[place] = position + 1, b"".join(record(token, report.prompt) for token in targets)
        return StepResult(
            plan.step,
            pack_i32(tokens),
            failed=pack_i32(failed),
            counts=bytes(counts) if plan.drafting else b"",
            drafted=self._tried(plan) if plan.drafting else b"",
            logprobs=StepLogprobs(records, prompts) if records or prompts else None,
        )

    @staticmethod
    def _tried(plan: StepPlan) -> bytes:
        counts = zip(unpack_i32(plan.counts), plan.samples, strict=True)
        planned = [count for count, samples in counts if samples]
        return bytes(count - 1 if place < plan.drafting else 0 for place, count in enumerate(planned))

    def answer(self, *tokens: int, failed: tuple[int, ...] = (), **changes: Any) -> list[Effect]:
        return self.send(msgspec.structs.replace(self.result(failed), **changes))

    def send(self, *events: Any) -> list[Effect]:
        effects = super().send(*events)
        for effect in effects:
            if isinstance(effect, SendTokens):
                for seq_id, told in effect.batch.logprobs.items():
                    self._hear(self.output, seq_id, told.first, told.records)
                    self._hear(self.prompt, seq_id, told.first_prompt - 1, told.prompt)
        return effects

    def _hear(self, heard: dict[int, bytes], seq_id: int, first: int, records: bytes) -> None:
        if records:
            known = heard.get(seq_id, b"")
            assert first * self.width(seq_id, heard is self.prompt) == len(known), "a gap or a repeat"
            heard[seq_id] = known + records

    def width(self, seq_id: int, prompt: bool) -> int:
        return record_bytes(self.reports[seq_id].prompt if prompt else self.reports[seq_id].top)

    def ask(self, prompt: list[int], top: int, of_prompt: int = -1, n: int = 1, **options: Any) -> int:
        message = self.message(prompt, n=n, report=Report(top, of_prompt), **options)
        for choice in range(n):
            self.reports[message.seq_id + choice] = Report(top, -1 if choice else of_prompt)
        self.send(message)
        return message.seq_id

    def check(self, seq_id: int, prompt: list[int]) -> None:
        """Each token that a tokenizer has has its record."""
        report, tokens = self.reports[seq_id], self.tokens[seq_id]
        wanted = b"".join(record(token, report.top) for token in tokens) if report.top >= 0 else b""
        assert self.output.get(seq_id, b"")[: len(wanted)] == wanted
        told = b"".join(record(token, report.prompt) for token in prompt[1:]) if report.prompt >= 0 else b""
        assert self.prompt.get(seq_id, b"") == told


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("limits", [{}, {"step_tokens": 8}, {"blocks": 14}])
def test_every_token_has_its_record(drafts: int, limits: dict[str, int]) -> None:
    """Alone, beside others, in chunks, with drafts, with preemptions in a small pool."""
    core = Reporting(drafts, **limits)
    asked = [(core.ask(ids(5), 2, 1), 5), (core.ask(ids(11, 40), 0), 11), (core.admit(ids(3)), 3)]
    asked += [(core.ask(ids(14, 60), -1, 0, max_tokens=20), 14), (core.ask(ids(9, 30), 4, 4, n=2), 9)]
    core.run(2000)
    assert not core.faults and core.all_free()
    for (seq_id, size), start in zip(asked, (10, 40, 10, 60, 30), strict=True):
        for choice in range(2 if start == 30 else 1):
            if seq_id in core.reports:
                core.check(seq_id + choice, ids(size, start))
    assert limits != {"blocks": 14} or core.core.metrics()["preemptions"] > 0


def test_a_prompt_that_wants_them_shares_no_prefix_until_they_are_there() -> None:
    core = Reporting()
    first = core.admit(ids(13))
    core.run()
    seq_id = core.ask(ids(13), 1, 1)
    assert core.plans[0].added[0].computed == 0
    core.send(WorkerLost())
    core.ready()
    core.answer()
    core.run()
    core.check(seq_id, ids(13))
    assert core.finished[seq_id].cached_tokens == 0 and core.finished[first].cached_tokens == 0
    again = core.admit(ids(13))
    assert core.plans[0].added[0].computed == 12 and again


def test_a_lost_worker_costs_no_record() -> None:
    core = Reporting(max_worker_deaths=99, step_tokens=6)
    seq_id = core.ask(ids(17), 1, 2, max_tokens=9)
    for answers in (0, 1, 2, 3, 4, 2):
        for _ in range(answers):
            core.answer()
        core.send(WorkerLost())
        core.plans.clear()
        core.ready()
    core.run()
    core.check(seq_id, ids(17))
    assert len(core.tokens[seq_id]) == 9


@pytest.mark.parametrize("answers", range(9))
def test_who_takes_over_gets_all_again(answers: int) -> None:
    core = Reporting(step_tokens=4)
    report = Report(1, 0)
    core.reports |= {OLD: report, NEW: report}
    admit = Admit(OLD, pack_i32(ids(9)), Sampling(6, report=report))
    core.send(admit)
    for _ in range(answers):
        if core.plans:
            core.answer()
    core.send(TokenizerLost(0))
    core.send(msgspec.structs.replace(admit, seq_id=NEW, origin=OLD))
    core.run()
    core.check(NEW, ids(9))
    assert len(core.tokens[NEW]) == 6


def test_a_new_scheduler_goes_on_from_what_it_is_given() -> None:
    core = Reporting()
    core.reports |= {OLD: Report(1), NEW: Report(1)}
    given = b"".join(record(token, 1) for token in (7, 8))
    admit = Admit(OLD, pack_i32(ids(5)), Sampling(4, report=Report(1)), output=pack_i32([7, 8]), logprobs=given)
    core.tokens[OLD], core.output[OLD] = [7, 8], given
    core.send(admit)
    core.run()
    core.check(OLD, ids(5))
    core.send(TokenizerLost(0))
    core.send(msgspec.structs.replace(admit, seq_id=NEW, origin=OLD))
    core.check(NEW, ids(5))
    assert len(core.tokens[NEW]) == 4
    core.send(msgspec.structs.replace(admit, seq_id=OLD + 9, logprobs=given[4:]))
    assert core.refused[-1].param == "logprobs"
    core.send(Admit(OLD + 10, pack_i32(ids(5)), Sampling(4, report=Report(1 << 20))))
    assert core.refused[-1].param == "logprobs"
    for named in (Report(1, named=(1, 2)), Report(2, named=(1, 1 << 30)), Report(1, named=(-1,))):
        core.send(Admit(OLD + 11, pack_i32(ids(5)), Sampling(4, report=named)))
        assert core.refused[-1].param == "logprob_token_ids"


def test_all_choices_have_the_named_tokens() -> None:
    core = Reporting()
    core.send(core.message(ids(5), n=2, report=Report(2, 1, named=(5, 6))))
    started = [row.sampling.report for plan in core.plans for row in plan.added]
    assert started == [Report(2, 1, named=(5, 6)), Report(2, named=(5, 6))], "the first choice tells of the prompt"


def test_rows_without_memory_have_none() -> None:
    core = Reporting()
    seq_id, other = core.ask(ids(5), 2), core.ask(ids(6, 50), 1, 1)
    core.answer()
    core.answer(failed=(0,))
    core.run()
    assert core.finished[seq_id].code == "out_of_memory"
    core.check(other, ids(6, 50))


def wrong(name: str, told: StepLogprobs) -> StepLogprobs | None:
    tokens, prompts = told.tokens, told.prompts
    place, (first, records) = next(iter(prompts.items()), (0, (1, b"")))
    return {
        "none": None,
        "short": StepLogprobs(tokens[4:], prompts),
        "long": StepLogprobs(tokens + bytes(4), prompts),
        "no prompt": StepLogprobs(tokens),
        "short prompt": StepLogprobs(tokens, {place: (first, records[4:])}),
        "late prompt": StepLogprobs(tokens, {place: (first + 1, records)}),
        "long prompt": StepLogprobs(tokens, {place: (first, records * 2)}),
        "part of a prompt": StepLogprobs(tokens, {place: (first, records[: len(records) // 2])}),
        "negative": StepLogprobs(tokens, {place: (-3, records)}),
        "elsewhere": StepLogprobs(tokens, {place + 7: (first, records)}),
        "of a place before": StepLogprobs(tokens, {-1: (first, records)}),
        "of another row": StepLogprobs(tokens, {place + 1: (first, records)}),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        *("none", "short", "long", "no prompt", "short prompt", "late prompt", "long prompt", "part of a prompt"),
        *("negative", "elsewhere", "of a place before", "of another row"),
    ],
)
def test_what_does_not_fit_the_plan_ends_the_worker(name: str) -> None:
    core = Reporting()
    core.ask(ids(7), 1, 0)
    core.admit(ids(7, 50))
    result = core.result()
    assert result.logprobs is not None
    core.send(msgspec.structs.replace(result, logprobs=wrong(name, result.logprobs)))
    assert len(core.faults) == 1, "and nothing was changed"
    assert not core.output and not core.prompt and not core.tokens


def test_records_that_nobody_wants_end_the_worker() -> None:
    core = Reporting()
    core.admit(ids(5))
    core.send(msgspec.structs.replace(core.result(), logprobs=StepLogprobs(record(5, 1))))
    assert core.faults


def test_an_old_row_s_tail_is_dropped() -> None:
    core = Reporting()
    seq_id = core.ask(ids(5), 1, max_tokens=30)
    for _ in range(3):
        core.answer()
    core.send(Abort(seq_id))
    heard = core.output[seq_id]
    core.run()
    assert core.output[seq_id] == heard and not core.faults
