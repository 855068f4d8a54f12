"""A tiny model behind the real scheduler core, as in production but for processes and clocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.columns import pack_i32, unpack_i32, unpack_u64
from common.config import Kv, Scheduler
from common.protocol import Admit, ModelFacts, Sampling, StepPlan, StepResult, WorkerReady
from services.scheduler.core import SchedulerCore
from services.scheduler.events import Event, SendPlan, SendTokens
from services.worker.groups import Layout, Storage
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.decoder import Decoder
from services.worker.layers.kv_cache import GroupedCache
from services.worker.layers.rope import RopeTable
from services.worker.memory import Shape
from services.worker.runner import Runner
from services.worker.state import Rows

FLOAT = Storage(torch.float32, torch.float32)
SHAPE = Shape(8, 96, 8)


@dataclass
class Served:
    """`pools`: blocks of each pool of the model's layout; the runner has one more of each, for padding."""

    decoder: Decoder
    pools: Sequence[int]
    limits: Scheduler = field(default_factory=lambda: Scheduler(max_rows=8, step_tokens=40))
    every: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout, cpu = self.layout, torch.device("cpu")
        groups = () if layout.is_plain else layout.groups
        spec = self.decoder.spec
        rows = Rows(SHAPE, spec.vocab_size, (2,), cpu, groups)
        cache = GroupedCache(layout, [blocks + 1 for blocks in self.pools], SHAPE.block_tokens, FLOAT, cpu)
        rope = RopeTable(spec.ropes, SHAPE.max_len, self.decoder.final_norm.weight)
        self.runner = Runner(self.decoder, rows, cache, rope, bind(("torch",), Facts("cpu")))
        self.core = SchedulerCore(self.limits, Kv(), seed=3)
        facts = ModelFacts(
            "tiny",
            "tiny",
            spec.vocab_size,
            SHAPE.max_len,
            (),
            SHAPE.block_tokens,
            self.pools[0],
            groups=groups,
            pools=tuple(self.pools[1:]),
        )
        self.plans: list[StepPlan] = []
        self.handle(WorkerReady(facts, SHAPE.max_rows))

    @property
    def layout(self) -> Layout:
        return self.decoder.layout(SHAPE.block_tokens, FLOAT, self.every)

    def handle(self, *events: Event) -> None:
        for effect in self.core.handle(events, 0.0):
            match effect:
                case SendPlan(plan):
                    self.plans.append(plan)
                case SendTokens(_, batch):
                    for seq_id, token in zip(unpack_u64(batch.seq_ids), unpack_i32(batch.tokens), strict=True):
                        self.outputs.setdefault(seq_id, []).append(token)
        self.core.check()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, n: int = 1) -> list[list[int]]:
        """Greedy, all at once; `n` choices of each prompt, one behind the other."""
        first = 1 + max(self.outputs, default=0)
        greedy = Sampling(num_tokens, temperature=0.0)
        self.handle(*(Admit(first + n * i, pack_i32(prompt), greedy, n) for i, prompt in enumerate(prompts)))
        while self.plans:
            plan = self.plans.pop(0)
            self.handle(StepResult(plan.step, self.runner.execute(plan).tokens()))
        return [self.outputs[first + i] for i in range(n * len(prompts))]
