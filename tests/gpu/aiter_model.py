"""A small random checkpoint through the provider `aiter` on a GPU that is not AMD's: its logits beside transformers'.

    python -m tests.gpu.aiter_model SOURCE NAME FOLDER

SOURCE is a wheel or source tree of AITER. What its Triton part lacks is served by our Triton kernels and torch.
NAME is one of tests/gpu/conftest.py. Writes one line of JSON.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker import model_engine
from services.worker.kernels import known_bad
from services.worker.kernels.gpu_arch import arch_of
from tests.gpu.conftest import Small
from tests.services.worker.kernels.impl.aiter import bare
from tests.services.worker.kernels.impl.aiter.contract import unpack

PROMPTS, LENGTH, GENERATED = 24, 75, 24


def logits_and_ops(small: Small, prompts: list[list[int]]) -> tuple[torch.Tensor, list[list[int]], list[str]]:
    """Of each generated position, float32 [positions, prompts, V]; the generated tokens; what AITER served."""
    tables = []
    bound = model_engine.bind_tested

    def bind(*arguments: Any) -> Any:
        tables.append(bound(*arguments))
        return tables[-1]

    patch = pytest.MonkeyPatch()
    patch.setattr(model_engine, "bind_tested", bind)
    # a cache of its own: workers of one cache compile one after the other
    own = f"worker.cache_dir={small.folder / 'cache'}"
    settings = "worker.compile_level=0", "model.max_len=512", own
    driver = small.engine('worker.kernels=["aiter","triton","torch"]', *settings)
    model = driver.engine._runner.model
    seen, original = [], model.logits

    def logits(x: torch.Tensor) -> torch.Tensor:
        seen.append(original(x))
        return seen[-1]

    patch.setattr(model, "logits", logits)
    bare.LAUNCHED.clear()
    outputs = driver.generate(prompts, GENERATED, chunk=50)
    # chunks of the prompts end one row each; then all rows decode together
    first = torch.cat([part.float() for part in seen[:PROMPTS]])
    steps = torch.stack([first, *(part.float() for part in seen[PROMPTS:])])
    return steps, outputs, [row.op for row in tables[0][0].table if row.provider == "aiter"]


def main(source: str, name: str, work: str) -> None:
    # the only places that know of architectures: nothing else is told that this GPU is another
    host = importlib.import_module("services.worker.kernels.impl.aiter._host")
    patch = pytest.MonkeyPatch()
    patch.setattr(host, "ARCHES", (arch_of(torch.device("cuda", 0)),))
    patch.setattr(known_bad, "RULES", ())
    bare.install(unpack(Path(source), Path(work)), "gfx950")
    small = Small(name, Path(work) / name)
    prompts = torch.randint(3, 4096, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()
    got, outputs, ops = logits_and_ops(small, prompts)
    sequences = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    exact, rounded = (
        small.logits(sequences, dtype)[:, LENGTH - 1 : -1].transpose(0, 1) for dtype in (torch.float32, torch.bfloat16)
    )
    report = {
        "ops": ops,
        "launched": dict(bare.LAUNCHED),
        "finite": bool(torch.isfinite(got).all()),
        "error": float((got - exact).square().mean().sqrt()),
        "error_of_bf16": float((rounded - exact).square().mean().sqrt()),
        "same_best": float((got.argmax(-1) == exact.argmax(-1)).float().mean()),
        "same_best_of_bf16": float((rounded.argmax(-1) == exact.argmax(-1)).float().mean()),
        "positions": got.shape[0] * got.shape[1],
    }
    print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
