"""Small random checkpoints on the GPU: the engine as a worker makes it, beside transformers' model in fp32 and bf16."""

import copy
import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from common import config as configuration
from common.columns import pack_i32, unpack_i32
from common.logprobs import Report
from common.pooling import Pooling
from common.protocol import KvGroup, RowStart, RowTable, Sampling, StepPlan

KERNELS = '["aiter","triton","torch"]' if torch.version.hip else '["triton","torch"]'  # as this GPU is served
GREEDY = Sampling(max_tokens=1000, temperature=0.0, ignore_eos=True)
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
ALL = {"num_experts_per_tok": 16}
LATENT: dict[str, Any] = {
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# name: (transformers config class, changes)
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {"intermediate_size": 1536, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "qwen3": (
        "Qwen3Config",
        {"intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "moe_intermediate_size": 256,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
        },
    ),
    "mistral_window": (
        "MistralConfig",
        {"intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 64},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "intermediate_size": 256,
            # bf16 turns near ties of this router into other experts, in transformers more than here: so all are chosen
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 64,
            "initializer_range": 0.03,  # with 0.06 bf16 moves transformers' own logits by more than their margins
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "query_pre_attn_scalar": 128,
            "sliding_window": 64,
            "sliding_window_pattern": 3,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "intermediate_size": 1024,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            "intermediate_size": 1024,
            "moe_intermediate_size": 256,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "sliding_window": 64,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "intermediate_size": 1024,
            "moe_intermediate_size": 256,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "deepseek_v2": (  # latents as published, of a query none; softmax over groups
        "DeepseekV2Config",
        LATENT
        | {
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        LATENT | {"q_lora_rank": 256, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    # in bf16 near ties of these routers, and of what the indexer chooses, turn as well: there all are chosen
    "deepseek_v3_all": (
        "DeepseekV3Config",
        LATENT | {"q_lora_rank": 256, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1} | ALL,
    ),
    "deepseek_v32_all": (
        "DeepseekV32Config",
        LATENT
        | {"q_lora_rank": 256, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1, "index_topk": 1024}
        | {"index_n_heads": 32, "index_head_dim": 128}
        | ALL,
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        LATENT
        | {"q_lora_rank": 256, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "index_topk": 64}
        | {"index_n_heads": 32, "index_head_dim": 128}
        # with 0.06 bf16 chooses other tokens so often that 23 % of the positions are clear; so 60 % are
        | {"initializer_range": 0.03},
    ),
}
kind, changes = SMALL["qwen3_next"]
SMALL["qwen3_next_all"] = kind, changes | {"num_experts": 4}  # of 16, bf16 leaves 28 % of the positions clear, so 47 %
EXACT = [name for name in SMALL if not name.endswith("_all")]
ROUNDED = [name for name in SMALL if f"{name}_all" not in SMALL]
# a driver that frees nothing behind a window needs more than the share of a pool that has only windows or states
BLOCKS = dict.fromkeys(SMALL, 6000) | dict.fromkeys(("mimo_v2_flash", "qwen3_next", "qwen3_next_all"), 40_000)
WITH_FP8_CACHE = [name for name in EXACT if not name.startswith("deepseek")]  # latents are cached as they are


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file's tests of a model go to one process (`-n 8 --dist loadgroup`), which makes the model once."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if "tests/gpu" in str(item.path):
                params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
                item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{params.get('name', '')}"))
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


class Small:
    """One checkpoint."""

    def __init__(self, name: str, folder: Path) -> None:
        import transformers

        kind, changes = SMALL[name]
        torch.manual_seed(1)
        config = getattr(transformers, kind)(**SIZES | changes)
        self.name, self.folder = name, folder
        self.reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter_name, parameter in self.reference.named_parameters():
            if "norm" in parameter_name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif parameter_name.endswith("sinks"):
                torch.nn.init.uniform_(parameter, -1.0, 1.0)
            elif parameter_name.endswith("A_log"):  # what a state forgets: with transformers' own all of it at once
                torch.nn.init.uniform_(parameter, -5.0, -1.0)
            elif parameter_name.endswith("bias"):
                torch.nn.init.uniform_(parameter, -0.3, 0.3)
            # both precisions hold the same numbers
            parameter.data = parameter.data.to(torch.bfloat16).float()
        self.reference.save_pretrained(folder)
        self.reference.cuda()
        # parameters only: frequencies of rotary embeddings stay in fp32, as in a model that was loaded in bf16
        self.rounded = copy.deepcopy(self.reference)
        for parameter in self.rounded.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)

    @torch.inference_mode()
    def logits(self, sequences: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Of all positions of sequences of one length, float32 [sequences, length, V]."""
        model = self.reference if dtype == torch.float32 else self.rounded
        return torch.cat([model(torch.tensor(part).cuda()).logits.float() for part in batches(sequences)])

    def engine(self, *settings: str) -> "Driver":
        """Beside other processes of the tests with compiled kernels of its own: one builder at a time has a cache."""
        from services.worker.model_engine import ModelEngine
        from services.worker.ranks import lead

        base = [
            "worker.device=cuda",
            f"worker.kernels={KERNELS}",
            f"kv.blocks={BLOCKS[self.name]}",
            "scheduler.max_rows=256",
        ]
        if process := os.environ.get("PYTEST_XDIST_WORKER"):
            base.append(f"worker.cache_dir={Path(tempfile.gettempdir()) / 'valence-gpu-tests' / process}")
        base.append("scheduler.step_tokens=512")  # fewer layouts are captured
        config = configuration.load(None, [f"model.source={self.folder}", *base, *settings])
        make = lead if config.worker.tensor_parallel > 1 else ModelEngine
        return Driver(make(config, lambda stage: None))


def batches(sequences: Sequence[Sequence[int]], size: int = 32) -> Iterator[Sequence[Sequence[int]]]:
    for begin in range(0, len(sequences), size):
        yield sequences[begin : begin + size]


class Driver:
    """A scheduler of a few lines."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._steps = count()

    def execute(self, work: Sequence[tuple[int, int, int, bool]], **changes: Any) -> Any:
        """work: (slot, position, count, samples) per row; returns the engine's pending result."""
        plan = StepPlan(
            next(self._steps),
            slots=pack_i32(row[0] for row in work),
            positions=pack_i32(row[1] for row in work),
            counts=pack_i32(row[2] for row in work),
            samples=bytes(row[3] for row in work),
            **changes,
        )
        return self.engine.execute(plan)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        sampling: Sequence[Sampling] | None = None,
        chunk: int = 2048,
    ) -> list[list[int]]:
        """All prompts at once: prompts in chunks of one row each, then decode steps of all; two plans in flight."""
        added = self._added(prompts, num_tokens, sampling)
        outputs: list[list[int]] = [[] for _ in prompts]
        in_flight: deque[tuple[list[int], Any]] = deque()

        def run(work: list[tuple[int, int, int, bool]], **changes: Any) -> None:
            in_flight.append(([slot for slot, _, _, samples in work if samples], self.execute(work, **changes)))
            while len(in_flight) > (2 if work else 0):
                slots, pending = in_flight.popleft()
                for slot, token in zip(slots, unpack_i32(pending.tokens()), strict=True):
                    outputs[slot].append(token)

        run([], added=added)
        for slot, prompt in enumerate(prompts):
            for begin in range(0, len(prompt), chunk):
                length = min(chunk, len(prompt) - begin)
                run([(slot, begin, length, begin + length == len(prompt))])
        for turn in range(num_tokens - 1):
            run([(slot, len(prompt) + turn, 1, True) for slot, prompt in enumerate(prompts)])
        run([], removed=pack_i32(range(len(prompts))))
        return outputs

    def vectors(
        self, prompts: Sequence[Sequence[int]], poolings: Sequence[Pooling], chunk: int = 2048
    ) -> list[list[float]]:
        """Of all prompts, whose chunks run together."""
        sampling = [Sampling(0, report=Report(pooling=pooling)) for pooling in poolings]
        self.execute([], added=self._added(prompts, 0, sampling)).tokens()
        found: list[list[float]] = [[] for _ in prompts]
        for begin in range(0, max(map(len, prompts)), chunk):
            slots = [slot for slot, prompt in enumerate(prompts) if begin < len(prompt)]
            pending = self.execute([(slot, begin, min(chunk, len(prompts[slot]) - begin), False) for slot in slots])
            assert not pending.tokens()
            told = pending.logprobs()
            for row, vector in (told.vectors if told is not None else {}).items():
                found[slots[row]] = memoryview(vector).cast("f").tolist()
        self.execute([], removed=pack_i32(range(len(prompts)))).tokens()
        return found

    def _added(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, sampling: Sequence[Sampling] | None
    ) -> list[RowStart]:
        facts, taken, added = self.engine.facts, Counter[int](), list[RowStart]()
        for slot, prompt in enumerate(prompts):
            tables = []
            for group in facts.groups or (KvGroup("full"),):
                needed = 1 if group.kind == "state" else -(-(len(prompt) + num_tokens) // facts.block_tokens)
                first = taken[group.pool]
                taken[group.pool] += needed
                tables.append(RowTable(0, pack_i32(range(first, first + needed))))
            given = sampling[slot] if sampling else GREEDY
            ids, others = pack_i32(prompt), tuple(tables[1:])
            added.append(RowStart(slot, slot, ids, len(prompt), 0, tables[0].blocks, given, tables=others))
        sizes = facts.num_blocks, *facts.pools
        assert all(taken[pool] <= blocks for pool, blocks in enumerate(sizes)), (
            "more than the cache has: raise kv.blocks"
        )
        return added


@pytest.fixture(scope="session")
def make_small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Small]:
    made: dict[str, Small] = {}

    def make(name: str) -> Small:
        if name not in made:
            made[name] = Small(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make
