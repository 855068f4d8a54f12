"""A whole engine on a tiny checkpoint in a folder, as the worker process makes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from common import config as configuration
from common.columns import pack_i32, unpack_i32
from common.errors import ConfigError
from common.protocol import KvGroup, Progress, RowStart, RowTable, Sampling, StepPlan
from services.worker import model_engine
from services.worker.block_tables import BlockTables
from services.worker.kernels.ops.paged_attention import paged_attention
from services.worker.kernels.ops.rope_kv_write import rope_kv_write
from services.worker.kernels.registry import BindError, Facts, bind
from services.worker.model_engine import ModelEngine, choose_device, cpu_threads, facts_of
from services.worker.state import Step
from tests.services.worker.quant.coded_checkpoints import MOE, coded, random_tensors, write
from tests.services.worker.quant.kinds import KINDS

GREEDY = Sampling(4, temperature=0.0)


@pytest.fixture
def folder(make_tiny: Callable[[str], Any], tmp_path: Path) -> Path:
    make_tiny("qwen3").reference.save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, *settings: str) -> tuple[ModelEngine, list[Progress]]:
    stages: list[Progress] = []
    threads = torch.get_num_threads()
    common = [f"model.source={folder}", "model.dtype=float32", f"worker.threads={threads}", "worker.device=cpu"]
    return ModelEngine(configuration.load(None, [*common, *settings]), stages.append), stages


def test_serves_transformers_tokens(folder: Path, make_tiny: Callable[[str], Any]) -> None:
    engine, stages = load(folder, "kv.block_tokens=8", "scheduler.max_rows=3", "kv.memory_gib=0.01")
    assert engine.max_rows == 3
    facts = engine.facts
    assert (facts.architecture, facts.vocab_size, facts.max_model_len) == ("Qwen3ForCausalLM", 131, 256)
    assert (facts.block_tokens, facts.num_blocks, facts.dtype, facts.eos_token_ids) == (8, 96, "float32", (2,))
    assert facts.kv_dtype == "float32" and engine._runner.cache.storage.dtype == torch.float32
    names = list(dict.fromkeys(stage.stage for stage in stages))
    assert names == ["model", "kernels", "weights", "memory", "compile", "vocabulary"]
    figures = engine.figures()
    assert figures["startup_seconds"] > figures["startup_compile_seconds"] > figures["kernels_late"] == 0
    weights = [stage for stage in stages if stage.stage == "weights"]
    assert weights[-1].done == weights[-1].total > 0
    prompt = list(range(5, 25))
    row = RowStart(1, 9, pack_i32(prompt), 20, 0, pack_i32(range(3)), Sampling(4, temperature=0.0))
    for _ in range(2):
        plan = StepPlan(
            1, added=[row], slots=pack_i32([1]), positions=pack_i32([0]), counts=pack_i32([20]), samples=b"\x01"
        )
        assert list(unpack_i32(engine.execute(plan).tokens())) == make_tiny("qwen3").greedy(prompt, 1)
        engine.reset()


def test_max_len_can_be_lowered_not_raised(folder: Path) -> None:
    engine, _ = load(folder, "model.max_len=100", "kv.blocks=20", "model.name=mine")
    assert (engine.facts.max_model_len, engine.facts.num_blocks, engine.facts.name) == (100, 20, "mine")
    with pytest.raises(ConfigError, match=r"max_len is 300, the model was made for at most 256"):
        load(folder, "model.max_len=300")


def test_random_weights_need_no_checkpoint(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        load(folder)
    engine, _ = load(folder, "model.weights=random", "kv.blocks=20")
    assert engine.facts.architecture == "Qwen3ForCausalLM"


def test_what_cannot_run_is_a_configuration_error(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("Qwen3ForCausalLM", "NobodyForCausalLM"))
    with pytest.raises(ConfigError, match=r"NobodyForCausalLM is not supported; supported: .*LlamaForCausalLM"):
        load(folder)
    (folder / "config.json").write_text(text.replace('"silu"', '"gelu"'))
    with pytest.raises(ConfigError, match="hidden_act"):
        load(folder)
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="no provider can run it on cpu"):
        load(folder, 'worker.kernels=["aiter"]')


def test_device_and_facts(make_tiny: Callable[[str], Any]) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    spec = make_tiny("qwen3").decoder.spec
    facts = facts_of(torch.device("cpu"), torch.float32, spec, 16, torch.float32)
    assert isinstance(facts, Facts) and (facts.device, facts.arch) == ("cpu", "")
    assert facts.shapes["head_dim"] == 16 and facts.shapes["block_tokens"] == 16
    assert not facts.shapes["kv_fp8"] and bind(("numba", "torch"), facts).provider(paged_attention) == "numba"


def test_an_8_bit_cache_is_for_kernels_that_can(
    folder: Path, make_tiny: Callable[[str], Any], monkeypatch: Any
) -> None:
    facts = facts_of(torch.device("cpu"), torch.float32, make_tiny("qwen3").decoder.spec, 16, torch.float8_e4m3fn)
    bindings = bind(("numba", "torch"), facts)
    assert bindings.provider(paged_attention) == bindings.provider(rope_kv_write) == "torch"
    with pytest.raises(BindError, match=r"paged_attention: no provider can run it .*\(numba: does not do kv_fp8\)"):
        bind(("torch",), facts, {"paged_attention": "numba"})
    monkeypatch.setattr(model_engine, "arch_of", lambda device: "sm_80")
    with pytest.raises(ConfigError, match=r'kv.dtype is "fp8", which GPUs older than sm_89 cannot do'):
        load(folder, "kv.dtype=fp8")


def test_tokens_of_an_8_bit_cache_are_about_the_references(folder: Path, make_tiny: Callable[[str], Any]) -> None:
    engine, _ = load(folder, "kv.dtype=fp8", "kv.block_tokens=8", "scheduler.max_rows=3", "kv.blocks=40")
    cache = engine._runner.cache
    assert engine.facts.kv_dtype == "float8_e4m3fn" and cache.storage.dtype == torch.float8_e4m3fn
    known = [list(prompt) for _, prompt in PROMPTS]
    for plan in [starts(*PROMPTS), *(decodes(*((slot, 40 + i) for slot in range(3))) for i in range(8))]:
        for tokens, new in zip(known, unpack_i32(engine.execute(plan).tokens()), strict=True):
            logits = make_tiny("qwen3").logits(tokens)[-1]
            assert logits.max() - logits[new] < 0.3 * logits.std()
            tokens.append(new)


def test_a_missing_gpu_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no GPU"):
        choose_device("cuda")


def test_each_worker_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert [choose_device("auto", number).index for number in range(2)] == current == [0, 1]
    with pytest.raises(ConfigError, match=r"worker-2 has no GPU: 2 can be seen"):
        choose_device("auto", 2)
    assert choose_device("cuda:0", 2) == torch.device("cuda", 0)
    assert choose_device("cpu", 9) == torch.device("cpu")


def test_workers_share_the_cores() -> None:
    assert cpu_threads(0, 1, 8) == 8 and cpu_threads(0, 3, 8) == 2 and cpu_threads(0, 9, 8) == 1
    assert cpu_threads(5, 3, 8) == 5


def starts(*rows: tuple[int, list[int]]) -> StepPlan:
    """(slot, prompt) of rows that begin; each has blocks of its own."""
    added = [
        RowStart(slot, slot, pack_i32(prompt), len(prompt), 0, pack_i32(range(8 * slot, 8 * slot + 8)), GREEDY)
        for slot, prompt in rows
    ]
    counts = pack_i32(len(prompt) for _, prompt in rows)
    slots, positions = pack_i32(slot for slot, _ in rows), pack_i32([0] * len(rows))
    return StepPlan(1, added=added, slots=slots, positions=positions, counts=counts, samples=b"\1" * len(rows))


def decodes(*rows: tuple[int, int], removed: tuple[int, ...] = ()) -> StepPlan:
    """(slot, position)."""
    slots, positions = pack_i32(slot for slot, _ in rows), pack_i32(position for _, position in rows)
    counts = pack_i32([1] * len(rows))
    return StepPlan(
        2, removed=pack_i32(removed), slots=slots, positions=positions, counts=counts, samples=b"\1" * len(rows)
    )


def limit_memory(engine: ModelEngine, monkeypatch: pytest.MonkeyPatch, fits: Callable[[Step], bool]) -> list[int]:
    """From now on a step that does not fit runs half and then fails; returns the tokens of those that were tried."""
    runner, tried = engine._runner, []
    whole = runner.model.logits

    def run(step: Step) -> Any:
        tried.append(int(step.counts.sum()))

        def logits(x: torch.Tensor) -> torch.Tensor:
            if not fits(step):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return whole(x)

        monkeypatch.setattr(runner.model, "logits", logits)
        return type(runner).run(runner, step)

    monkeypatch.setattr(runner, "run", run)
    return tried


PROMPTS = [(slot, list(range(3 + slot, 43 + slot))) for slot in range(3)]


def test_a_step_without_memory_runs_in_pieces_with_the_same_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = load(folder, "kv.block_tokens=8", "scheduler.max_rows=3", "kv.blocks=40")
    plans = [starts(*PROMPTS), decodes(*((slot, 40) for slot in range(3)))]
    wanted = [engine.execute(plan).tokens() for plan in plans]
    engine.reset()
    tried = limit_memory(engine, monkeypatch, lambda step: bool(step.counts.sum() <= 50))
    results = [engine.execute(plan) for plan in plans]
    assert [result.tokens() for result in results] == wanted
    assert [result.failed for result in results] == [b"", b""] and tried == [120, 80, 40, 40, 40, 3]


def test_a_rank_of_a_group_does_not_run_pieces_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it in the whole step: it ends, and with it the group."""
    engine, _ = load(folder, "kv.block_tokens=8", "scheduler.max_rows=3", "kv.blocks=40")
    tried = limit_memory(engine, monkeypatch, lambda step: False)
    engine._group = object()  # type: ignore[assignment]
    with pytest.raises(torch.OutOfMemoryError):
        engine.execute(starts(*PROMPTS))
    assert tried == [120]


def test_a_step_that_has_moved_a_state_is_not_run_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = load(folder, "kv.block_tokens=8", "scheduler.max_rows=3", "kv.blocks=40")
    engine._runner.rows.beside.append(BlockTables(KvGroup("state", every=8), 3, 1, torch.device("cpu")))
    tried = limit_memory(engine, monkeypatch, lambda step: False)
    plan = starts(*PROMPTS)
    added = [msgspec.structs.replace(row, tables=(RowTable(0, pack_i32([row.slot])),)) for row in plan.added]
    outcome = engine.execute(msgspec.structs.replace(plan, added=added))
    assert list(unpack_i32(outcome.failed)) == [0, 1, 2] and len(outcome.tokens()) == 12 and tried == [120]


def test_a_row_that_cannot_run_fails_alone_and_its_slot_can_be_used_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = load(folder, "kv.block_tokens=8", "scheduler.max_rows=3", "kv.blocks=40")
    plans = [starts(*PROMPTS), decodes(*((slot, 40) for slot in range(3)))]
    wanted = [list(unpack_i32(engine.execute(plan).tokens())) for plan in plans]
    engine.reset()
    with monkeypatch.context() as patch:
        limit_memory(engine, patch, lambda step: 1 not in step.slots)
        first = engine.execute(plans[0])
    second = engine.execute(plans[1])  # made before anybody knew
    assert list(unpack_i32(first.failed)) == [1] and second.failed == b""
    for result, tokens in zip((first, second), wanted, strict=True):
        got = list(unpack_i32(result.tokens()))
        assert (got[0], got[2]) == (tokens[0], tokens[2]) and len(got) == 3
    engine.execute(decodes((0, 41), (2, 41), removed=(1,)))
    again = engine.execute(starts(PROMPTS[1]))
    assert list(unpack_i32(again.tokens())) == [wanted[0][1]] and again.failed == b""


def test_any_other_device_error_ends_the_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = load(folder, "kv.block_tokens=8", "scheduler.max_rows=3", "kv.blocks=40")

    def run(step: Step) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine._runner, "run", run)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.execute(starts(*PROMPTS))


def test_blocks_are_copied_singly_when_there_is_no_memory_for_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = load(folder, "kv.block_tokens=8", "scheduler.max_rows=3", "kv.blocks=40")
    storage = engine._runner.cache.storage
    storage.copy_(torch.rand_like(storage))
    sources = storage[:, :, [3, 4]].clone()
    whole = type(engine._runner.cache).copy_blocks

    def copy_blocks(source: list[int], target: list[int], pool: int) -> None:
        if len(source) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        whole(engine._runner.cache, source, target, pool)

    monkeypatch.setattr(engine._runner.cache, "copy_blocks", copy_blocks)
    engine.execute(StepPlan(1, copy_source=pack_i32([3, 4]), copy_target=pack_i32([7, 8])))
    assert torch.equal(storage[:, :, [7, 8]], sources)


def test_tokens_that_nobody_has_read_are_read_before_a_step_in_many_pieces(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they lie where the device writes those of every so many-th run."""
    engine, _ = load(folder, "kv.block_tokens=8", "scheduler.max_rows=3", "kv.blocks=40")
    unread = engine.execute(starts(PROMPTS[0]))
    assert not isinstance(unread._pending, bytes)
    limit_memory(engine, monkeypatch, lambda step: bool(step.counts.sum() <= 20))
    assert engine.execute(starts(*PROMPTS[1:])).failed == b""
    assert isinstance(unread._pending, bytes)


def test_a_step_that_was_counted_is_not_run_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = load(folder, "kv.block_tokens=8", "scheduler.max_rows=3", "kv.blocks=40")
    rows = engine._runner.rows
    commit = type(rows).commit

    def fails(step: Step) -> None:
        commit(rows, step)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rows, "commit", fails)
    with pytest.raises(AssertionError, match="too late to run this step again"):
        engine.execute(starts(PROMPTS[0]))


@pytest.mark.parametrize(
    ("kind", "settings", "kv_dtype"),
    [
        ("deepseek", (), "float32"),
        ("gptq_ordered", ("kv.dtype=fp8",), "float8_e4m3fn"),
        (None, ("worker.quantize=int8", "kv.dtype=fp8_per_token_head"), "float8_e4m3fn"),
        (None, ("worker.quantize=int4", "model.dtype=auto"), "float32"),
    ],
)
def test_coded_weights_and_caches_are_within_reach_of_the_configuration(
    kind: str | None, settings: tuple[str, ...], kv_dtype: str, tmp_path: Path
) -> None:
    tensors = random_tensors(MOE)
    folder = write(tmp_path, MOE, tensors)
    if kind is not None:
        folder = write(tmp_path, MOE, coded(KINDS[kind], tensors)[0], KINDS[kind].settings)
    engine, _ = load(folder, "kv.blocks=64", "kv.block_tokens=8", "scheduler.max_rows=3", *settings)
    assert engine.facts.kv_dtype == kv_dtype
    layer = engine._runner.model.layers[0]
    wanted = KINDS[kind].form if kind is not None else settings[0].removeprefix("worker.quantize=")
    assert layer.attention.project.weight.format_name == wanted
    scale = engine._runner.cache.layers[0].scale
    assert (scale is not None and scale.each) == ("kv.dtype=fp8_per_token_head" in settings)
    row = RowStart(1, 9, pack_i32(range(5, 25)), 20, 0, pack_i32(range(3)), GREEDY)
    plan = StepPlan(
        1, added=[row], slots=pack_i32([1]), positions=pack_i32([0]), counts=pack_i32([20]), samples=b"\x01"
    )
    (token,) = unpack_i32(engine.execute(plan).tokens())
    assert 0 <= token < 131
    if scale is not None and scale.each:
        assert scale.k[:2].gt(0).all(), "written along with the keys"


def test_a_bad_scale_stops_before_there_is_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, _ = coded(KINDS["deepseek"], random_tensors(MOE))
    tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"][0, 0] = float("nan")
    folder = write(tmp_path, MOE, tensors, KINDS["deepseek"].settings)
    monkeypatch.setattr(model_engine, "start", lambda *arguments: pytest.fail("memory is taken for KV"))
    with pytest.raises(ConfigError, match=r"model.safetensors: tensor .*o_proj.weight_scale_inv\" holds .* NaN"):
        load(folder, "kv.blocks=64")


def test_a_profile_from_when_it_is_asked_for_until_it_is_not(folder: Path, tmp_path: Path) -> None:
    engine, _ = load(folder, "kv.memory_gib=0.01")
    there = tmp_path / "profiles"
    for wanted in (there, there, None, None):
        engine.profile(wanted)
        assert (engine._profile.file is not None) == (wanted is not None)
    assert len(list(there.iterdir())) == 1
