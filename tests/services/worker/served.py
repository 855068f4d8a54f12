"""A tiny model behind the real scheduler core, as in production but for processes and clocks."""

from collections.abc import Callable, Sequence

import torch

from common.columns import pack_i32, unpack_i32, unpack_u64
from common.config import Kv, Scheduler
from common.protocol import Admit, ModelFacts, Sampling, StepPlan, StepResult, WorkerReady
from services.scheduler.core import SchedulerCore
from services.scheduler.events import Event, SendPlan, SendTokens
from services.worker.groups import Storage
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import GroupedCache
from services.worker.layers.rope import RopeTable
from services.worker.memory import Shape
from services.worker.runner import Runner
from services.worker.state import Rows

FLOAT = Storage(torch.float32, torch.float32)
SHAPE = Shape(8, 96, 8)
FEW = Scheduler(max_rows=8, step_tokens=40)


class Serving:
    """The core, and whatever runs its plans."""

    def __init__(self, facts: ModelFacts, execute: Callable[[StepPlan], bytes], limits: Scheduler) -> None:
        self.core = SchedulerCore(limits, Kv(), seed=3)
        self._execute = execute
        self._plans: list[StepPlan] = []
        self._outputs: dict[int, list[int]] = {}
        self._handle(WorkerReady(facts, limits.max_rows))

    def _handle(self, *events: Event) -> None:
        for effect in self.core.handle(events, 0.0):
            match effect:
                case SendPlan(plan):
                    self._plans.append(plan)
                case SendTokens(_, batch):
                    for seq_id, token in zip(unpack_u64(batch.seq_ids), unpack_i32(batch.tokens), strict=True):
                        self._outputs.setdefault(seq_id, []).append(token)
        self.core.check()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, n: int = 1) -> list[list[int]]:
        """Greedy, all at once; `n` choices of each prompt, one behind the other."""
        first = 1 + max(self._outputs, default=0)
        greedy = Sampling(num_tokens, temperature=0.0, ignore_eos=True)
        self._handle(*(Admit(first + n * i, pack_i32(prompt), greedy, n) for i, prompt in enumerate(prompts)))
        while self._plans:
            plan = self._plans.pop(0)
            self._handle(StepResult(plan.step, self._execute(plan)))
        return [self._outputs[first + i] for i in range(n * len(prompts))]


class Served(Serving):
    """A decoder; `pools`: blocks of each pool of its layout. The cache has one more of each, for padding."""

    def __init__(self, decoder: Decoder, pools: Sequence[int], limits: Scheduler = FEW, every: int = 0) -> None:
        self.layout = decoder.layout(SHAPE.block_tokens, FLOAT, every)
        spec, cpu, groups = decoder.spec, torch.device("cpu"), () if self.layout.is_plain else self.layout.groups
        rows = Rows(SHAPE, spec.vocab_size, (2,), cpu, groups)
        cache = GroupedCache(self.layout, [blocks + 1 for blocks in pools], SHAPE.block_tokens, FLOAT, cpu)
        rope = RopeTable(spec.ropes, SHAPE.max_len, decoder.final_norm.weight)
        self.runner = Runner(decoder, rows, cache, rope, bind(("torch",), Facts("cpu")))
        known = "tiny", "tiny", spec.vocab_size, SHAPE.max_len, (), SHAPE.block_tokens, pools[0]
        facts = ModelFacts(*known, groups=groups, pools=tuple(pools[1:]))
        super().__init__(facts, lambda plan: self.runner.execute(plan).tokens(), limits)
