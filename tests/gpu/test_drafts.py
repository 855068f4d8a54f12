"""Drafts on the GPU: a scheduler core and the engine, with and without, in captured layouts and eager.

Also what no CPU shows: positions that only the device knows while two plans are in flight.
"""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.columns import pack_i32
from common.kv_needs import needs
from common.protocol import Admit, KvGroup, Sampling
from tests.e2e.test_draft_equality import ROWS, Said, say
from tests.gpu.test_tokens import LEVELS
from tests.services.worker import spelled

KINDS = [
    Sampling(60, temperature=0.0),
    Sampling(60, seed=1, temperature=0.8),
    Sampling(60, seed=2, temperature=1.0, top_p=0.9),
    Sampling(60, seed=4, temperature=0.7, frequency_penalty=0.5),
    Sampling(60, temperature=0.0, logit_bias=((5, 3.0),), min_tokens=5),
    # of three tokens, whose orders come again: what a model made of random numbers says otherwise need not
    Sampling(60, temperature=0.0, logit_bias=((5, 90.0), (6, 90.0), (7, 90.0))),
    Sampling(60, seed=5, temperature=1.0, grammar=spelled.regex("([a-z]{2,9}-[0-9]{2,4} )+")),  # has no drafts
]


def asked() -> list[Admit]:
    """Prompts that repeat themselves, so that there is much to find."""
    prompts = [[3 + (7 * number + place % (3 + number)) % 4000 for place in range(20 + number)] for number in range(20)]
    return [
        Admit(number, pack_i32(prompt), msgspec.structs.replace(KINDS[number % len(KINDS)], ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]


WITHOUT: dict[tuple[str, str], Said] = {}  # what models say at a level without drafts


def said_by(small: Any, *settings: str) -> tuple[Said, dict[str, float]]:
    few = "model.dtype=float32", f"scheduler.max_rows={ROWS}", "scheduler.step_tokens=128"
    engine = small.engine(*few, *settings).engine
    engine._runner.held.grammars = spelled.grammars(engine.facts.vocab_size)
    facts, groups = engine.facts, engine.facts.groups or (KvGroup("full"),)
    least = needs(groups, 1 + len(facts.pools), facts.max_model_len, facts.block_tokens)
    return say(lambda: engine.execute, msgspec.structs.replace(facts, num_blocks=least[0]), asked())


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_is_said(make_small: Callable[[str], Any], level: str) -> None:
    small = make_small("qwen3")
    wanted = said_without(small, level)
    for method in (["ngram"], ["draft", f"speculative.model={small.folder}"]):
        said, figures = said_by(small, *LEVELS[level], f"speculative.method={method[0]}", *method[1:])
        same = sum(said[seq_id] == wanted[seq_id] for seq_id in wanted)
        print(f"{method[0]}: {figures['accepted_tokens']:.0f} of {figures['draft_tokens']:.0f} held; {same} rows equal")
        # sums in batches of other sizes: a near tie of fp32 may turn
        assert same >= len(wanted) - 1 and figures["accepted_tokens"] > 0


def said_without(small: Any, level: str) -> Said:
    """Made once: a head that is not asked for changes nothing."""
    if (small.name, level) not in WITHOUT:
        WITHOUT[small.name, level], _ = said_by(small, *LEVELS[level])
    return WITHOUT[small.name, level]


def compare(small: Any, level: str, *method: str) -> dict[str, float]:
    wanted = said_without(small, level)
    said, figures = said_by(small, *LEVELS[level], *method)
    same = sum(said[seq_id] == wanted[seq_id] for seq_id in wanted)
    print(f"{figures['accepted_tokens']:.0f} of {figures['draft_tokens']:.0f} held; {same} of {len(wanted)} rows equal")
    assert same >= len(wanted) - 1 and figures["draft_tokens"] > 0
    return figures


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["mistral_window", "gpt_oss", "gemma3", "mimo_v2_flash", "qwen3_next"])
def test_layers_with_windows_and_states_say_the_same(make_small: Callable[[str], Any], name: str, level: str) -> None:
    assert (
        compare(make_small(name), level, "speculative.method=ngram", "speculative.ngram_min=1")["accepted_tokens"] > 0
    )


HEADS = {
    "glm4_moe": ("model.layers.4.", ("enorm", "hnorm", "shared_head.norm", "eh_proj"), "model.layers.4."),
    "deepseek_v3": ("model.layers.4.", ("enorm", "hnorm", "shared_head.norm", "eh_proj"), "model.layers.4."),
    "qwen3_next": ("mtp.layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"), "mtp."),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", HEADS)
def test_a_models_own_head_says_the_same(
    make_small: Callable[[str], Any], tmp_path: Path, name: str, level: str
) -> None:
    """Its layer is the model's last one once more, between a projection and norms that mean nothing."""
    small = make_small(name)
    folder = tmp_path / name
    shutil.copytree(small.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    layer, own, prefix = HEADS[name]
    tensors = load_file(folder / "model.safetensors")
    last = {key: values for key, values in tensors.items() if key.startswith(f"model.layers.{layers - 1}.")}
    assert layers == 4 and last, "names above count four layers"
    tensors |= {key.replace(f"model.layers.{layers - 1}.", layer): values.clone() for key, values in last.items()}
    tensors |= {f"{prefix}{norm}.weight": torch.rand(hidden) for norm in own[:3]}
    tensors[f"{prefix}{own[3]}.weight"] = torch.randn(hidden, 2 * hidden) * 0.03
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    headed = copy.copy(small)
    headed.folder = folder
    compare(headed, level, "speculative.method=mtp", "speculative.tokens=2")
