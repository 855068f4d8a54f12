"""Drafts at two ranks (gloo): what is said is what one rank says without drafts, and all ranks hear the same."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.drafted import said_by
from tests.services.worker.mtp_checkpoint import make_mtp
from tests.services.worker.tiny import make_tiny

RANKS, LIMIT_S = 2, 600
HEADS = ["DeepseekV3", "MiMoV2Flash", "Qwen3Next"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """Settings by name; the first is the model's."""
    parent = tmp_path_factory.mktemp("ranks")
    found = {}
    for name in HEADS:
        folder = make_mtp(parent / name, f"{name}ForCausalLM").folder
        found[name] = [f"model.source={folder}", "speculative.method=mtp", "speculative.tokens=2"]
    folder = make_tiny("qwen3", parent / "qwen3").folder
    draft = ["speculative.method=draft", f"speculative.model={folder}", "speculative.tokens=3"]
    found["draft"] = [f"model.source={folder}", *draft]
    (parent / "cases.json").write_text(json.dumps(found))
    return parent, found


@pytest.fixture(scope="module")
def heard(cases: tuple[Path, dict[str, list[str]]]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.e2e.drafted", str(cases[0])]
    started = [
        subprocess.Popen([*command, str(rank), str(RANKS)], stdout=subprocess.PIPE, text=True) for rank in range(RANKS)
    ]
    try:
        texts = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * RANKS
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize("name", [*HEADS, "draft"])
def test_two_ranks_with_drafts_say_what_one_says_without(
    cases: tuple[Path, dict[str, list[str]]], heard: list[dict[str, Any]], name: str
) -> None:
    assert heard[0][name] == heard[1][name], "both ranks have drafted and drawn the same"
    assert heard[0][name]["said"] == said_by(cases[1][name][:1])["said"]
    assert heard[0][name]["draft_tokens"] > 10 and any(case["preemptions"] for case in heard[0].values())
    assert name != "draft" or heard[0][name]["accepted_tokens"] > 20, "a model that drafts for itself is right"
