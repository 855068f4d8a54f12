"""A worker without a model that checks every plan as a real one would suffer from it.

Each KV slot remembers the history that was written into it, so a read of a missing, stale, foreign or wrongly shared
block is seen at once. So does a state's block, as a whole. It holds its rows exactly as StepPlan describes them.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from common.columns import pack_i32, unpack_i32
from common.kv_needs import first_block
from common.logprobs import StepLogprobs
from common.protocol import Copies, Growth, KvGroup, ModelFacts, RowStart, RowTable, Sampling, StepPlan, StepResult
from tests.sim.language import mix, pooled, sample, start


@dataclass
class FakeRow:
    seq_id: int
    sampling: Sampling
    num_prompt: int
    tokens: list[int]
    histories: list[int]  # after each token
    computed: int
    tables: list[list[int]]  # by group; -1: not had
    behind: int = 0  # tokens that its state lacks: drafts of the last step that held
    pooled: list[int] = field(default_factory=list)  # histories that its vector is made of
    broken: bool = False  # a failed step, or the lack of memory in one, has left it without its next token


@dataclass
class FakeWorker:
    facts: ModelFacts
    max_rows: int
    step_tokens: int
    chunk_tokens: int
    salts: dict[int, int]  # by seq_id
    rows: dict[int, FakeRow] = field(default_factory=dict)
    # What a block holds: of tokens (group, history) by offset, or a whole state (group, tokens, history).
    kv: dict[tuple[int, int], dict[int, tuple[int, int]] | tuple[int, int, int]] = field(default_factory=dict)
    plans: deque[StepPlan] = field(default_factory=deque)
    results: deque[StepResult] = field(default_factory=deque)
    last_step: int = -1
    excused_until: int = -1  # plans up to this step were made before a failure was known
    unheard_failures: int = 0
    tries: int = 0  # rows with drafts so far

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        return self.facts.groups or (KvGroup("full"),)

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
        self._copy(plan, fails)
        self._check_writes(slots, positions, counts, drafting)
        tokens, kept, tried = [], [], []
        vectors: dict[int, bytes] = {}
        for place, (slot, position, count, samples) in enumerate(
            zip(slots, positions, counts, plan.samples, strict=True)
        ):
            row, fault = self.rows[slot], fails or place in failed
            if place < drafting:
                accepted = self._draft(row, position, count, fault)
            else:
                accepted = [self._run(row, position, count, bool(samples), fault)]
            if vector := self._vector(row, position, count, fault):
                vectors[place] = vector
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
                StepResult(
                    plan.step,
                    pack_i32(tokens),
                    failed=failed_places,
                    counts=counts_kept,
                    drafted=drafted,
                    logprobs=StepLogprobs(vectors=vectors) if vectors else None,
                )
            )

    @staticmethod
    def _vector(row: FakeRow, position: int, count: int, fails: bool) -> bytes:
        """Where a prompt is whole that is pooled."""
        pooling, end = row.sampling.report.pooling, position + count
        if pooling is None or fails:
            return b""
        row.pooled += row.histories[position:end]
        return pooled(row.pooled, pooling) if end == len(row.tokens) else b""

    def _apply(self, plan: StepPlan) -> None:
        for slot in unpack_i32(plan.removed):
            del self.rows[slot]
        for added in plan.added:
            self._add(added)
        grown = [Growth(0, plan.grown_slots, plan.grown_blocks), *plan.grown]
        assert len({growth.group for growth in grown}) == len(grown), "a group grows twice"
        for growth in grown:
            for slot, block in zip(unpack_i32(growth.slots), unpack_i32(growth.blocks), strict=True):
                self.rows[slot].tables[growth.group].append(block)
        pools = (self.facts.num_blocks, *self.facts.pools)
        for row in self.rows.values():
            for number, group in enumerate(self.groups):
                blocks = self._used(row, number)
                assert len(set(blocks)) == len(blocks), "a block is twice in a table"
                assert all(0 <= block < pools[group.pool] for block in blocks), "no such block"

    def _used(self, row: FakeRow, number: int) -> list[int]:
        """Blocks of the row that its next token reads or writes, as far as it has them."""
        group = self.groups[number]
        return row.tables[number][first_block(group, row.computed, self.facts.block_tokens) :]

    def _users(self, pool: int) -> dict[int, int]:
        """How many tables have each block of a pool."""
        users: dict[int, int] = {}
        for row in self.rows.values():
            for number, group in enumerate(self.groups):
                for block in self._used(row, number) if group.pool == pool else ():
                    users[block] = users.get(block, 0) + 1
        return users

    def _add(self, added: RowStart) -> None:
        assert 0 <= added.slot < self.max_rows and added.slot not in self.rows, "the slot is taken"
        assert all(row.seq_id != added.seq_id for row in self.rows.values()), "the sequence has a row already"
        tokens = list(unpack_i32(added.tokens))
        assert 0 <= added.computed < len(tokens), "nothing is left to compute"
        histories, history = [], start(self.salts[added.seq_id])
        for token in tokens:
            history = mix(history, token)
            histories.append(history)
        started = (RowTable(added.first, added.blocks), *added.tables)
        assert len(started) == len(self.groups), "a table for each group"
        tables = [[*[-1] * table.first, *unpack_i32(table.blocks)] for table in started]
        self.rows[added.slot] = FakeRow(
            added.seq_id, added.sampling, added.num_prompt, tokens, histories, added.computed, tables
        )

    def _copy(self, plan: StepPlan, fails: bool) -> None:
        """A step that fails may not have copied anything."""
        for copies in (Copies(0, plan.copy_source, plan.copy_target), *plan.copies):
            sources, targets = unpack_i32(copies.source), unpack_i32(copies.target)
            assert not set(sources) & set(targets), "a copy's source is another one's target"
            assert len(set(targets)) == len(targets), "a copy overwrites another one"
            users = self._users(copies.pool)
            for source, target in zip(sources, targets, strict=True):
                found = self.kv.get((copies.pool, source), {})
                checkpoint = target not in users
                assert users.get(target, 0) <= 1, "the copy's target is shared"
                assert not checkpoint or isinstance(found, tuple) or self._excused(), "only states have checkpoints"
                if isinstance(found, tuple) and not self._excused():
                    assert found[1] % self.groups[found[0]].every == 0, "a state between two checkpoints is copied"
                if fails:
                    found = {}
                self.kv[copies.pool, target] = found if isinstance(found, tuple) else dict(found)

    def _check_writes(self, slots: memoryview, positions: memoryview, counts: memoryview, drafting: int) -> None:
        block_tokens = self.facts.block_tokens
        users = [self._users(pool) for pool in range(1 + len(self.facts.pools))]
        for place, (slot, position, count) in enumerate(zip(slots, positions, counts, strict=True)):
            for group, table in zip(self.groups, self.rows[slot].tables, strict=True):
                first, last = position // block_tokens, (position + count - 1) // block_tokens
                if group.kind == "state":
                    crosses = position // group.every != (position + count - 1) // group.every
                    assert place < drafting or not crosses, "a chunk crosses a checkpoint"
                    first = last = 0
                assert last < len(table), "writes behind the block table"
                for block in table[first : last + 1]:
                    assert users[group.pool].get(block) == 1, f"writes into block {block}, which others use"

    def _draft(self, row: FakeRow, highest: int, count: int, fails: bool) -> list[int]:
        """The newest token and some drafts, of which some hold; what did not leaves its KV behind."""
        assert count - 1 <= self.facts.drafts and row.computed <= highest, "more drafts than may be"
        position, accepted = row.computed, []
        self.tries += 1
        held = mix(self.tries, len(row.tokens)) % count
        for at in range(position, position + held + 1):
            accepted.append(self._run(row, at, 1, True, fails, drafted=at > position))
        if not row.broken:
            self._write(row, row.computed, [-1] * (count - 1 - held), drafted=True)
        return accepted

    def _run(self, row: FakeRow, position: int, count: int, samples: bool, fails: bool, drafted: bool = False) -> int:
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
        wants_token = row.sampling.report.pooling is None and end == len(row.tokens)
        assert samples == wants_token, "samples exactly behind the last known token"
        if lacking := self._lacking(row, position):
            assert self._excused(), f"{row.seq_id:#x} reads wrong KV before {position}: {lacking}"
            row.broken = True
            self._write(row, position, [0] * count)
            return 0
        self._write(row, position, row.histories[position:end], drafted)
        row.behind = row.behind + 1 if drafted else 0
        if not samples:
            return 0
        index = len(row.tokens) - row.num_prompt
        token = sample(row.histories[-1], row.sampling, index, self.facts.vocab_size, self.facts.eos_token_ids)
        row.tokens.append(token)
        row.histories.append(mix(row.histories[-1], token))
        return token

    def _lacking(self, row: FakeRow, position: int) -> str:
        """What a token at `position` does not find of those before it."""
        block_tokens = self.facts.block_tokens
        for number, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
            if group.kind == "state":
                end = position - row.behind
                wanted = number, end, row.histories[end - 1]
                if position and self.kv.get((group.pool, table[0])) != wanted:
                    return f"the state of group {number}"
                continue
            least = max(position - group.window + 1, 0) if group.kind == "window" else 0
            for place in range(least, position):
                found = self.kv.get((group.pool, table[place // block_tokens]))
                held = found.get(place % block_tokens) if isinstance(found, dict) else None
                if held != (number, row.histories[place]):
                    return f"position {place} of group {number}"
        return ""

    def _write(self, row: FakeRow, position: int, histories: list[int], drafted: bool = False) -> None:
        """`drafted`: tokens that the row's own next step adds to its state, or does not."""
        block_tokens = self.facts.block_tokens
        for number, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
            if group.kind == "state":
                if drafted:
                    continue
                self.kv[group.pool, table[0]] = number, position + len(histories), histories[-1]
                continue
            for place, history in enumerate(histories, position):
                at = group.pool, table[place // block_tokens]
                held = self.kv.get(at)
                if not isinstance(held, dict):
                    held = self.kv[at] = {}
                held[place % block_tokens] = number, history

    def _excused(self) -> bool:
        """A failed step's consequences are the scheduler's fault only in plans made after it heard of the failure."""
        return self.unheard_failures > 0 or self.last_step <= self.excused_until
