"""Sums over ranks with the norm behind them: AITER's one kernel or its parts, alone and in models of two ranks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist

from services.worker.kernels.impl.aiter import _all_reduce, all_reduce
from services.worker.kernels.impl.aiter.all_reduce_add_norm import IMPL, refuses
from services.worker.kernels.ops.all_reduce_add_norm import all_reduce_add_norm
from services.worker.kernels.registry import Facts, bind
from services.worker.kernels.trial import try_case
from tests.services.worker.kernels.impl.aiter.fake import install
from tests.services.worker.kernels.impl.aiter.models import generate, serve
from tests.services.worker.kernels.impl.aiter.test__all_reduce import CPU, OTHER, give_custom
from tests.services.worker.kernels.impl.aiter.together import ARCHITECTURES, PROMPTS, model_of

MI350 = Facts("cuda", "gfx950", torch.bfloat16, {"hidden_size": 4096})
LIMIT_S = 300


@pytest.fixture
def group() -> Iterator[None]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _all_reduce.of_process.cache_clear()
    yield
    _all_reduce.of_process.cache_clear()
    dist.destroy_process_group()


def test_a_process_alone_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, exact=True)
    for case in all_reduce_add_norm.cases:
        assert try_case(IMPL, case, Facts("cpu"), CPU) is None


@pytest.mark.parametrize("rows", [4, 64])
def test_the_residual_is_changed_in_place(group: None, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """In the one kernel, and where it is for another one (Custom sums 4 KiB at most, here one rank gives 1 MiB)."""
    give_custom(monkeypatch, exact=True)
    monkeypatch.setattr(_all_reduce, "own_device", lambda: CPU)
    monkeypatch.setattr(_all_reduce.of_process(), "_norm_bytes", 16 << 10)
    share, residual, weight = torch.randn(rows, 64), torch.randn(rows, 64), torch.rand(64)
    total = residual + share + (OTHER if rows == 4 else 0)
    wanted = all_reduce_add_norm.meaning(total.clone(), torch.zeros(rows, 64), weight, 1e-6)
    normed = IMPL.run(share, residual, weight, 1e-6)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(normed, wanted)


def test_graphs_are_captured_in_one_context_for_both_ops() -> None:
    assert IMPL.around_capture is all_reduce.IMPL.around_capture is not None


def test_refuses_what_cannot_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert "custom_all_reduce cannot be imported" in str(refuses(MI350))
    give_custom(monkeypatch)
    assert refuses(MI350) is None
    assert "not of 16384" in str(refuses(Facts("cuda", "gfx950", torch.bfloat16, {"hidden_size": 16384})))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    command = [sys.executable, "-m", "tests.services.worker.kernels.impl.aiter.together", str(meeting)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True)
    each: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return each


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "compiled"])
def test_whole_models_of_two_ranks_have_the_tokens_of_one_process(
    said: list[dict[str, Any]], architecture: str
) -> None:
    torchs = bind(("torch",), Facts("cpu"))
    model = model_of(ARCHITECTURES[0] if architecture == "compiled" else architecture, torchs)
    wanted = generate(serve(model, torchs), PROMPTS, 6, chunk=16)
    assert len({tuple(tokens) for tokens in wanted}) > 1
    assert [each[architecture]["tokens"] for each in said] == [wanted, wanted]


@pytest.mark.parametrize(
    ("architecture", "normed", "plain"),
    [("LlamaForCausalLM", 3, 2), ("compiled", 3, 2), ("Qwen3MoeForCausalLM", 1, 4), ("Glm4MoeForCausalLM", 3, 3)],
)
def test_sums_bring_their_norms(said: list[dict[str, Any]], architecture: str, normed: int, plain: int) -> None:
    """Of two layers in a step. Plain ones: of the embedding and of the last layer, of what shared experts add, and
    of attention before a router that norms by itself."""
    for each in said:
        calls = each[architecture]["calls"]
        steps = calls["norm"] // normed
        assert steps > 6 and calls == {"norm": steps * normed, "sum": steps * plain}
