"""Tokens of two ranks are those of one for every model of the registry, of four for every way to divide; and what each
rank reads.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from services.worker.compile import TRACED, compile_pieces
from services.worker.division import Division, cuts_of
from services.worker.kernels.registry import Bindings, Facts, bind
from services.worker.layers.decoder import build_decoder
from services.worker.loader import load_parameters
from services.worker.models.registry import find_model
from services.worker.models.spec import Config
from services.worker.quant.registry import choose_policy
from services.worker.quant.sharded import SummedExperts, SummedWeight, VocabularyWeight
from services.worker.shares import Rank, local_spec
from services.worker.source import open_model
from tests.services.worker.divided import FEW, TOKENS, said_of
from tests.services.worker.tiny import Tiny, every

BINDINGS = bind(("torch",), Facts("cpu"))
LIMIT_S = 900
# One of each way to divide: the others' layers are divided by the same rules, which two ranks prove for every model.
FOUR = (
    *("llama_tied_biased", "qwen3_moe_mixed", "mixtral", "glm4_moe_biased", "gpt_oss_64", "Gemma3ForCausalLM"),
    *("MiMoV2FlashForCausalLM", "Qwen3NextForCausalLM", "deepseek_v2_groups", "deepseek_v3_yarn", "EgMlaForCausalLM"),
    *("DeepseekV32ForCausalLM", "glm_moe_dsa_shared"),
)
CASES = [(2, name) for name in every()] + [(4, name) for name in FOUR]


@pytest.fixture(scope="module")
def folder(make_tiny: Callable[[str], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every tiny model as files."""
    parent = tmp_path_factory.mktemp("divided")
    for name in every():
        (parent / name).symlink_to(make_tiny(name).folder)
    return parent


@pytest.fixture(scope="module")
def heard(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By number of ranks and rank: what it says, of all models that so many are asked for."""
    four = folder.with_name(f"{folder.name}-four")
    four.mkdir()
    for name in FOUR:
        (four / name).symlink_to((folder / name).resolve())
    command = [sys.executable, "-m", "tests.services.worker.divided", str(folder), "2", str(four), "4"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True)
    said: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return said


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str], Any]:
    known: dict[str, Any] = {}

    def one(name: str) -> Any:
        if name not in known:
            known[name] = said_of(folder / name)
        return known[name]

    return one


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_ranks_draw_the_tokens_of_one(
    heard: dict[str, list[dict[str, Any]]], alone: Callable[[str], Any], ranks: int, name: str
) -> None:
    said = heard[str(ranks)]
    assert len(said) == ranks
    wanted = [tokens[: FEW if ranks > 2 else TOKENS] for tokens in alone(name)["tokens"]]
    for rank, each in enumerate(said):
        assert each[name]["tokens"] == wanted, f"rank {rank}"


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_ranks_have_the_vectors_of_one(
    heard: dict[str, list[dict[str, Any]]], alone: Callable[[str], Any], ranks: int, name: str
) -> None:
    one = alone(name)["vectors"]
    assert all(map(any, one))
    for rank, each in enumerate(heard[str(ranks)]):
        for vector, wanted in zip(each[name]["vectors"], one, strict=True):
            assert vector == pytest.approx(wanted, abs=1e-4), f"rank {rank}"


def loaded(folder: Path, rank: Rank, bindings: Bindings = BINDINGS) -> Any:
    """One rank's decoder and its parameters."""
    source = open_model(str(folder))
    _, model = find_model(source.config["architectures"])  # type: ignore[arg-type]
    spec = model.read(Config(source.config))
    division = Division(spec, model.names, rank, bindings)
    policy = choose_policy("float32", bindings=bindings)
    parameters = load_parameters(source.tensors, model, spec, policy, division=division)
    return build_decoder(local_spec(spec, rank), model, parameters, bindings), parameters


@pytest.mark.parametrize("name", ["llama_tied_biased", "qwen3_moe_mixed"])
def test_each_rank_holds_its_share(folder: Path, name: str) -> None:
    sizes = []
    for rank in range(2):
        decoder, parameters = loaded(folder / name, Rank(rank, 2))
        assert parameters.unread() == []
        assert isinstance(decoder.embedding, VocabularyWeight) and decoder.embedding.out_features == 131
        layer = decoder.layers[0]
        assert isinstance(layer.attention.out.weight, SummedWeight)
        assert not isinstance(layer.attention.project.weight, SummedWeight), "divided by rows, nothing is to be summed"
        last = decoder.layers[2].mlp
        if name == "qwen3_moe_mixed":
            assert isinstance(last.experts, SummedExperts) and last.experts.part.gate_up.shape[:2] == (6, 40)
            assert last.router.weight.shape[0] == 6, "routers are whole"
        else:
            bias = layer.attention.out.bias
            assert bool(bias.any()) == (rank == 0), "a bias of a sum is counted once"
        sizes.append(decoder.embedding.num_bytes)
    assert sum(sizes) == 131 * 48 * 4 and abs(sizes[0] - sizes[1]) <= 48 * 4


def test_parts_of_all_ranks_are_the_whole(folder: Path) -> None:
    """Every tensor: its parts side by side, or it at one rank or at all."""
    for name in (
        "qwen2",
        "mixtral",
        "Glm4MoeForCausalLM",
        "deepseek_v3_yarn",
        "DeepseekV32ForCausalLM",
        "EgMlaForCausalLM",
    ):
        source = open_model(str(folder / name))
        _, model = find_model(source.config["architectures"])  # type: ignore[arg-type]
        spec = model.read(Config(source.config))
        divisions = [Division(spec, model.names, Rank(rank, 4), BINDINGS) for rank in range(4)]
        cuts = dict(cuts_of(spec, model.names, Rank(0, 4)))
        for key, tensor in source.tensors.items():
            whole, cut = tensor.dense(torch.float32), cuts[key]
            parts = [division.part(key, tensor).dense(torch.float32) for division in divisions]
            if cut is None:
                assert all(torch.equal(part, whole) for part in parts), key
            elif cut.once:
                assert torch.equal(sum(parts), whole), key  # type: ignore[arg-type]
            elif ".k_proj" in key or ".v_proj" in key:
                assert torch.equal(torch.cat(parts[::2]), whole) and torch.equal(torch.cat(parts[1::2]), whole), key
            else:
                assert torch.equal(torch.cat(parts, cut.dim), whole), key


@pytest.mark.parametrize("name", ["llama_tied_biased", "qwen3_moe"])
def test_a_compiler_takes_collectives_as_they_are(make_tiny: Callable[[str], Tiny], folder: Path, name: str) -> None:
    """A group of one has all of them in its graph."""
    torch._dynamo.reset()
    tiny = make_tiny(name)
    bindings = bind(("torch",), Facts("cpu"), opaque=True)
    decoder, _ = loaded(folder / name, Rank(0, 1), bindings)
    decoder.pieces = compile_pieces(TRACED, decoder)
    tokens = replace(tiny, decoder=decoder).driver().generate([[5, 9, 77], [30]], 4)
    torch._dynamo.reset()
    assert tokens == tiny.driver().generate([[5, 9, 77], [30]], 4)


def test_a_tensor_without_a_rule_is_an_error(folder: Path) -> None:
    source = open_model(str(folder / "llama"))
    _, model = find_model(source.config["architectures"])  # type: ignore[arg-type]
    division = Division(model.read(Config(source.config)), model.names, Rank(1, 2), BINDINGS)
    with pytest.raises(ConfigError, match=r'model.safetensors: "model.layers.0.mystery" cannot be divided among ranks'):
        division.part("model.layers.0.mystery", source.tensors["model.norm.weight"])
