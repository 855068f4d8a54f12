"""Start-up on a CPU, and the decisions of a start on a GPU with a made-up meter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common import config as configuration
from common import env
from common.columns import unpack_i32
from common.errors import ConfigError
from common.metrics import checked
from common.protocol import KvGroup, Progress
from services.worker import compile as levels
from services.worker import memory, warmup
from services.worker.graphs import GraphKey
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.rope import RopeTable
from services.worker.startup import Figures, Parts, Stages, explained, measure, open_cache, run_all, start


def make_parts(tiny: Any, kv_dtype: torch.dtype = torch.float32) -> Parts:
    decoder = tiny.decoder
    shape = memory.Shape(max_rows=5, max_len=60, block_tokens=8)
    rope = RopeTable(decoder.spec.ropes, shape.max_len, decoder.final_norm.weight)
    return Parts(decoder, bind(("torch",), Facts("cpu")), rope, shape, (2,), torch.device("cpu"), kv_dtype)


@pytest.fixture
def parts(make_tiny: Callable[[str], Any]) -> Parts:
    return make_parts(make_tiny("qwen3"))


def test_stages_are_passed_on_and_timed() -> None:
    seen: list[Progress] = []
    stages = Stages(seen.append)
    stages("weights", 1, 2)
    stages("weights", 2, 2)
    stages("compile")
    stages.end()
    assert seen == [Progress("weights", 1, 2), Progress("weights", 2, 2), Progress("compile")]
    assert set(stages.seconds) == {"weights", "compile"} and min(stages.seconds.values()) >= 0


def test_all_plans_of_a_start_run(parts: Parts) -> None:
    """With the real rows, which assert whatever does not fit."""
    sizes = warmup.Sizes(parts.shape, 24, 0, vectors=True)
    runner = parts.runner(parts.small(sizes))
    seen: list[tuple[int, int]] = []
    plans = [*warmup.all_kinds(sizes), *warmup.reporting(sizes), *warmup.largest_steps(sizes)]
    plans += warmup.first_steps(sizes)
    run_all(runner, plans, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(plans) - 1, len(plans)) and not runner.rows.live.any()


def test_a_start_asks_only_for_ops_that_triton_has(parts: Parts) -> None:
    """One of torch's among them, and no start on a GPU compiles by all cores (compile.build_ahead)."""
    sizes = warmup.Sizes(parts.shape, 24, 0, vectors=True)
    run_all(parts.runner(parts.small(sizes)), warmup.all_kinds(sizes), lambda done, total: None)
    kernels = {path.stem for path in Path(levels.__file__).parent.glob("kernels/impl/triton/[a-z]*.py")}
    assert parts.bindings.asked and parts.bindings.asked <= kernels


def test_all_plans_of_a_start_run_in_groups(make_tiny: Callable[[str], Any]) -> None:
    parts = make_parts(make_tiny("GptOssForCausalLM"))
    assert len(parts.groups) == 3
    sizes = warmup.Sizes(parts.shape, 24, 0, parts.groups)
    plans = [*warmup.all_kinds(sizes), *warmup.largest_steps(sizes), *warmup.first_steps(sizes)]
    run_all(parts.runner(parts.small(sizes)), plans, lambda done, total: None)


def test_a_small_cache_has_a_state_for_each_of_a_few_rows(parts: Parts) -> None:
    groups = (KvGroup("full"), KvGroup("state", 1, every=8))
    sizes = warmup.Sizes(parts.shape, 24, 0, groups)
    for plan in warmup.all_kinds(sizes):
        live = [unpack_i32(row.tables[0].blocks)[0] for row in plan.added]
        assert len(set(live)) == len(live) and max(live) < sizes.num_states


def test_blocks_are_of_the_kv_dtype(make_tiny: Callable[[str], Any]) -> None:
    """3 layers, keys and values, 8 tokens of 2 heads of 16."""
    config = configuration.load(None, ["kv.memory_gib=0.0001", "model.max_len=60", "scheduler.step_tokens=24"])
    numbers = {}
    for dtype, itemsize in ((torch.float32, 4), (torch.float8_e4m3fn, 1)):
        parts = make_parts(make_tiny("qwen3"), dtype)
        assert parts.pool_bytes == (3 * 2 * 8 * 2 * 16 * itemsize,)
        runner, (numbers[itemsize],) = start(parts, config, levels.EAGER, Stages(lambda progress: None))
        assert runner.cache.storage.dtype == dtype
        assert runner.cache.storage.nbytes == numbers[itemsize] * parts.pool_bytes[0]
        assert all((layer.scale is None) == (itemsize == 4) for layer in runner.cache.layers)
    assert numbers == {4: 17, 1: 40}  # the second is all that the rows can use


class FakeMeter:
    """A GPU of 1 GiB whose figures follow a list."""

    peaks = (300_000_000, 120_000_000)
    held = (100_000_000, 110_000_000, 112_000_000, 100_000_000)

    def __init__(self, device: torch.device) -> None:
        self._held, self._peaks = iter(self.held), iter(self.peaks)

    def restart(self) -> int:
        return next(self._held)

    def peak(self) -> int:
        return next(self._peaks)

    def total_and_others(self) -> tuple[int, int]:
        return 2**30, 50_000_000


def test_measuring_takes_the_small_cache_off_and_bounds_graphs(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "Meter", FakeMeter)
    seen: list[Progress] = []
    stages = Stages(seen.append)
    sizes = warmup.Sizes(parts.shape, 24, 0)
    keys = (GraphKey(1), GraphKey(4), GraphKey(4, 16))
    readings = measure(parts, sizes, keys, stages)
    cache = (sizes.num_blocks + 1) * parts.pool_bytes[0]
    assert readings == memory.Readings(
        total=2**30,
        others=50_000_000,
        weights=100_000_000,
        activations=200_000_000 - cache,
        graphs=8_000_000 + 3 * memory.GRAPH_BYTES,
    )
    assert list(dict.fromkeys(progress.stage for progress in seen)) == ["compile", "memory"]
    assert measure(parts, sizes, (), stages).graphs == 0


def test_a_cpu_gets_a_share_of_free_memory(parts: Parts) -> None:
    config = configuration.load(None, ["kv.memory_gib=0.01", "scheduler.step_tokens=24"])
    seen: list[Progress] = []
    runner, (num_blocks,) = start(parts, config, levels.EAGER, Stages(seen.append))
    assert runner.cache.num_blocks == num_blocks == 5 * 8
    assert list(dict.fromkeys(progress.stage for progress in seen)) == ["memory", "compile"]


def test_the_rank_with_the_least_room_decides(parts: Parts) -> None:
    """All ranks of a group share one block table."""

    class Group:
        def least(self, number: int) -> int:
            assert number == 5 * 8, "what this rank has room for"
            return 17

    config = configuration.load(None, ["kv.memory_gib=0.01", "scheduler.step_tokens=24"])
    together = parts._replace(group=Group())  # type: ignore[arg-type]
    runner, (num_blocks,) = start(together, config, levels.EAGER, Stages(lambda progress: None))
    assert runner.cache.num_blocks == num_blocks == 17


def test_compiled_pieces_give_the_same_tokens(make_tiny: Callable[[str], Any]) -> None:
    torch._dynamo.reset()
    config = configuration.load(None, ["kv.blocks=40", "scheduler.step_tokens=24"])
    tokens = []
    for level in (levels.EAGER, levels.TRACED):
        parts = make_parts(make_tiny("llama"))
        plain = parts.model.pieces
        try:
            runner, _ = start(parts, config, level, Stages(lambda progress: None))
            plan = warmup.make_plan(warmup.Sizes(parts.shape, 24, 0), [warmup.Work(0, 9, True, warmup.GREEDY)] * 2)
            tokens.append(runner.execute(plan).tokens())
        finally:
            parts.model.pieces = plain
    torch._dynamo.reset()
    assert tokens[0] == tokens[1]


def test_the_lack_of_memory_at_start_is_the_configurations_fault() -> None:
    text = r"^the device has not enough memory for the largest step: lower it \(CUDA out of memory. Tried .* 2 GiB\)$"
    with pytest.raises(ConfigError, match=text), explained("the largest step", "lower it"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    with pytest.raises(RuntimeError, match="illegal"), explained("x", "y"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_the_cache_folder_follows_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    config = configuration.load(None, [f"worker.cache_dir={tmp_path}"])
    kept = open_cache(config, {"hidden_size": 8}, torch.device("cpu"))
    assert kept.folder.parent == tmp_path / "kernels"
    assert env.child_environment(0)["TRITON_CACHE_DIR"] == str(kept.folder / "triton")
    assert open_cache(config, {"hidden_size": 9}, torch.device("cpu")).folder != kept.folder
    assert open_cache(config, {"hidden_size": 8}, torch.device("cpu")).folder == kept.folder


def test_figures_have_listed_names_and_tell_what_was_compiled_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(levels, "builds", lambda: levels.Builds(5, 7))
    figures = Figures({"weights": 2.0, "kernels": 0.5}, 9.0)
    first = checked(figures())
    assert (first["startup_seconds"], first["startup_weights_seconds"]) == (9.0, 2.0)
    assert first["startup_capture_seconds"] == first["kernels_late"] == 0.0
    assert (first["kernels_compiled"], first["kernels_found"]) == (5, 7)
    monkeypatch.setattr(levels, "builds", lambda: levels.Builds(6, 9))
    monkeypatch.setattr(levels, "newest_builds", lambda count: ["norm_kernel"] * count)
    with caplog.at_level("WARNING"):
        assert figures() == figures() == first | {"kernels_late": 1.0}
    assert [record.message for record in caplog.records] == [
        "3 kernels built while serving: norm_kernel, norm_kernel, norm_kernel"
    ]
