"""A worker without a model that checks every plan as a real one would suffer from it.

Each KV slot remembers the history that was written into it, so a read of a missing, stale, foreign or wrongly shared
block is seen at once. It holds its rows exactly as StepPlan describes them.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from common.columns import pack_i32, unpack_i32
from common.protocol import ModelFacts, RowStart, Sampling, StepPlan, StepResult
from tests.sim.language import mix, sample, start


@dataclass
class FakeRow:
    seq_id: int
    sampling: Sampling
    num_prompt: int
    tokens: list[int]
    histories: list[int]  # after each token
    computed: int
    blocks: list[int]
    broken: bool = False  # a failed step, or the lack of memory in one, has left it without its next token


@dataclass
class FakeWorker:
    facts: ModelFacts
    max_rows: int
    step_tokens: int
    chunk_tokens: int
    salts: dict[int, int]  # by seq_id
    rows: dict[int, FakeRow] = field(default_factory=dict)
    kv: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, offset) -> history
    plans: deque[StepPlan] = field(default_factory=deque)
    results: deque[StepResult] = field(default_factory=deque)
    last_step: int = -1
    excused_until: int = -1  # plans up to this step were made before a failure was known
    unheard_failures: int = 0
    tries: int = 0  # rows with drafts so far

    def step(self, fails: bool, failed: Collection[int] = ()) -> None:
        """Runs the oldest plan and queues its result. `failed`: places of rows that have no memory."""
        plan = self.plans.popleft()
        assert plan.step > self.last_step, "steps do not grow"
        self.last_step = plan.step
        self._apply(plan)
        slots, positions, counts = unpack_i32(plan.slots), unpack_i32(plan.positions), unpack_i32(plan.counts)
        assert len(slots) == len(positions) == len(counts) == len(plan.samples) > 0, "columns differ in length"
        assert len(set(slots)) == len(slots), "a slot is twice in a step"
        assert sum(counts) <= self.step_tokens, "the step exceeds its budget"
        drafting = plan.drafting
        assert 0 <= drafting <= len(slots) and plan.samples[:drafting].count(1) == drafting, "drafts without a token"
        chunks = counts[drafting:]
        assert not self.chunk_tokens or max(chunks, default=0) <= self.chunk_tokens, "a chunk is too long"
        assert not len(chunks) or max(counts[:drafting], default=1) == 1, "drafts beside chunks"
        self.unheard_failures += fails or bool(failed)
        self._copy(plan)
        self._check_writes(slots, positions, counts)
        tokens, kept, tried = [], [], []
        for place, (slot, position, count, samples) in enumerate(
            zip(slots, positions, counts, plan.samples, strict=True)
        ):
            row, fault = self.rows[slot], fails or place in failed
            if place < drafting:
                accepted = self._draft(row, position, count, fault)
            else:
                accepted = [self._run(row, position, count, bool(samples), fault)]
            if samples:
                tokens += accepted
                kept.append(len(accepted))
                tried.append(count - 1 if place < drafting else 0)
        if fails:
            self.results.append(StepResult(plan.step, b"", error="injected failure"))
        else:
            counts_kept, drafted = (bytes(kept), bytes(tried)) if drafting else (b"", b"")
            failed_places = pack_i32(sorted(failed))
            self.results.append(
                StepResult(plan.step, pack_i32(tokens), failed=failed_places, counts=counts_kept, drafted=drafted)
            )

    def _apply(self, plan: StepPlan) -> None:
        for slot in unpack_i32(plan.removed):
            del self.rows[slot]
        for added in plan.added:
            self._add(added)
        for slot, block in zip(unpack_i32(plan.grown_slots), unpack_i32(plan.grown_blocks), strict=True):
            self.rows[slot].blocks.append(block)
        for row in self.rows.values():
            assert len(set(row.blocks)) == len(row.blocks), "a block is twice in a table"
            assert all(0 <= block < self.facts.num_blocks for block in row.blocks), "no such block"

    def _add(self, added: RowStart) -> None:
        assert 0 <= added.slot < self.max_rows and added.slot not in self.rows, "the slot is taken"
        assert all(row.seq_id != added.seq_id for row in self.rows.values()), "the sequence has a row already"
        tokens = list(unpack_i32(added.tokens))
        assert 0 <= added.computed < len(tokens), "nothing is left to compute"
        histories, history = [], start(self.salts[added.seq_id])
        for token in tokens:
            history = mix(history, token)
            histories.append(history)
        blocks = list(unpack_i32(added.blocks))
        self.rows[added.slot] = FakeRow(
            added.seq_id, added.sampling, added.num_prompt, tokens, histories, added.computed, blocks
        )

    def _copy(self, plan: StepPlan) -> None:
        sources, targets = unpack_i32(plan.copy_source), unpack_i32(plan.copy_target)
        assert not set(sources) & set(targets), "a copy's source is another one's target"
        for source, target in zip(sources, targets, strict=True):
            assert sum(target in row.blocks for row in self.rows.values()) == 1, "the copy's target is shared"
            for offset in range(self.facts.block_tokens):
                self.kv[target, offset] = self.kv.get((source, offset), 0)

    def _check_writes(self, slots: memoryview, positions: memoryview, counts: memoryview) -> None:
        block_tokens = self.facts.block_tokens
        users: dict[int, int] = {}
        for row in self.rows.values():
            for block in row.blocks:
                users[block] = users.get(block, 0) + 1
        for slot, position, count in zip(slots, positions, counts, strict=True):
            blocks = self.rows[slot].blocks
            assert position + count <= len(blocks) * block_tokens, "writes behind the block table"
            for idx in range(position // block_tokens, (position + count - 1) // block_tokens + 1):
                assert users[blocks[idx]] == 1, f"writes into block {blocks[idx]}, which others use"

    def _draft(self, row: FakeRow, highest: int, count: int, fails: bool) -> list[int]:
        """The newest token and some drafts, of which some hold; what did not leaves its KV behind."""
        assert count - 1 <= self.facts.drafts and row.computed <= highest, "more drafts than may be"
        position, accepted = row.computed, []
        self.tries += 1
        held = mix(self.tries, len(row.tokens)) % count
        for at in range(position, position + held + 1):
            accepted.append(self._run(row, at, 1, True, fails))
        if not row.broken:
            self._write(row, row.computed, [-1] * (count - 1 - held))
        return accepted

    def _run(self, row: FakeRow, position: int, count: int, samples: bool, fails: bool) -> int:
        assert count > 0 and position == row.computed, f"position {position} follows {row.computed}"
        end = position + count
        row.computed = end
        if fails:
            row.broken = True
        if row.broken:
            assert self._excused()
            self._write(row, position, [0] * count)
            return 0
        assert end <= len(row.tokens), "computes tokens that nobody knows"
        assert samples == (end == len(row.tokens)), "samples exactly behind the last known token"
        block_tokens = self.facts.block_tokens
        for place in range(position):
            found = self.kv.get((row.blocks[place // block_tokens], place % block_tokens))
            if found != row.histories[place]:
                assert self._excused(), f"{row.seq_id:#x} reads wrong KV at {place} before {position}"
                row.broken = True
                self._write(row, position, [0] * count)
                return 0
        self._write(row, position, row.histories[position:end])
        if not samples:
            return 0
        index = len(row.tokens) - row.num_prompt
        token = sample(row.histories[-1], row.sampling, index, self.facts.vocab_size, self.facts.eos_token_ids)
        row.tokens.append(token)
        row.histories.append(mix(row.histories[-1], token))
        return token

    def _write(self, row: FakeRow, position: int, histories: list[int]) -> None:
        block_tokens = self.facts.block_tokens
        for place, history in enumerate(histories, position):
            self.kv[row.blocks[place // block_tokens], place % block_tokens] = history

    def _excused(self) -> bool:
        """A failed step's consequences are the scheduler's fault only in plans made after it heard of the failure."""
        return self.unheard_failures > 0 or self.last_step <= self.excused_until
