from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from services.worker.kernels.registry import Facts, bind
from services.worker.layers.decoder import build_decoder
from services.worker.layers.mlp import GatedMlp
from services.worker.loader import check_tensors, expected_shapes, load_parameters
from services.worker.models.registry import find_model
from services.worker.models.spec import Config, DecoderSpec, ModelDef
from services.worker.quant.experts import DenseExperts
from services.worker.quant.registry import choose_policy
from services.worker.source import open_model


@dataclass(frozen=True)
class Stored:
    name: str
    values: torch.Tensor
    storage: str = "F32"
    source: str = "tiny.safetensors"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.to(dtype, copy=True)

    def blocks(self) -> torch.Tensor:
        raise ValueError("not in blocks")

    def entry(self, index: int) -> torch.Tensor:
        return self.values[index]


@dataclass(frozen=True)
class Checkpoint:
    tensors: dict[str, Stored]
    model: ModelDef
    spec: DecoderSpec


@pytest.fixture
def checkpoint(make_tiny: Callable[[str], Any]) -> Callable[[str], Checkpoint]:
    def make(name: str) -> Checkpoint:
        tiny = make_tiny(name)
        _, model = find_model([type(tiny.reference).__name__])
        tensors = {key: Stored(key, value) for key, value in tiny.tensors.items()}
        return Checkpoint(tensors, model, tiny.decoder.spec)

    return make


WHOLE = [
    *("llama", "llama_tied_biased", "qwen2", "qwen3", "qwen3_tied", "mistral"),
    *("qwen3_moe", "qwen3_moe_mixed", "mixtral"),
]


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_model_is_read_once(name: str, checkpoint: Callable[[str], Checkpoint]) -> None:
    given = checkpoint(name)
    reports: list[tuple[int, int]] = []
    parameters = load_parameters(
        given.tensors,
        given.model,
        given.spec,
        choose_policy("float32"),
        lambda done, total: reports.append((done, total)),
    )
    assert parameters.unread()
    decoder = build_decoder(given.spec, given.model, parameters, bind(("torch",), Facts("cpu")))
    assert parameters.unread() == []
    assert reports[-1][0] == reports[-1][1]
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    embedding = given.tensors[given.model.names.embedding].values
    assert torch.equal(decoder.embedding.dequantize(), embedding)


def test_fused_parameters_lie_one_below_the_other(checkpoint: Callable[[str], Checkpoint]) -> None:
    given = checkpoint("llama_tied_biased")
    parameters = load_parameters(given.tensors, given.model, given.spec, choose_policy("float32"))
    names = [name.format(i=1) for name in given.model.names.qkv]
    expected = torch.cat([given.tensors[name].values for name in names])
    assert torch.equal(parameters.weight(*names).dequantize(), expected)
    biases = [name.replace(".weight", ".bias") for name in names]
    assert parameters.has(biases[0])
    assert torch.equal(parameters.tensor(*biases), torch.cat([given.tensors[name].values for name in biases]))


def test_experts_lie_in_two_stacks(checkpoint: Callable[[str], Checkpoint]) -> None:
    given = checkpoint("qwen3_moe_mixed")
    parameters = load_parameters(given.tensors, given.model, given.spec, choose_policy("float32"))
    decoder = build_decoder(given.spec, given.model, parameters, bind(("torch",), Facts("cpu")))
    experts = decoder.layers[2].mlp.experts  # type: ignore[union-attr]
    assert isinstance(experts, DenseExperts) and experts.num_experts == 6
    prefix = "model.layers.2.mlp.experts.4."
    gate, up, down = (given.tensors[f"{prefix}{part}_proj.weight"].values for part in ("gate", "up", "down"))
    assert torch.equal(experts.gate_up[4], torch.cat((gate, up))) and torch.equal(experts.down[4], down)
    assert isinstance(decoder.layers[1].mlp, GatedMlp)


def test_a_missing_expert_is_named(checkpoint: Callable[[str], Checkpoint]) -> None:
    given = checkpoint("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors = {key: value for key, value in given.tensors.items() if key != name}
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_parameters(tensors, given.model, given.spec, choose_policy("float32"))


def test_a_repeated_tied_head_is_accepted(checkpoint: Callable[[str], Checkpoint]) -> None:
    given = checkpoint("llama_tied_biased")
    assert "lm_head.weight" not in given.tensors
    head = Stored("lm_head.weight", given.tensors[given.model.names.embedding].values)
    parameters = load_parameters(given.tensors | {head.name: head}, given.model, given.spec, choose_policy("float32"))
    assert not parameters.has("lm_head.weight")


def test_a_checkpoint_saved_without_a_head(checkpoint: Callable[[str], Checkpoint]) -> None:
    """As those are that were made for vectors: names without their root. The head is the embedding, or is missed."""
    given = checkpoint("qwen3_tied")
    bare = {name.removeprefix("model."): tensor for name, tensor in given.tensors.items()}
    assert load_parameters(bare, given.model, given.spec, choose_policy("float32")).has(given.model.names.final_norm)
    untied = checkpoint("qwen3")
    bare = {key.removeprefix("model."): each for key, each in untied.tensors.items() if not key.startswith("lm_head")}
    with pytest.raises(ConfigError, match="lm_head"):
        load_parameters(bare, untied.model, untied.spec, choose_policy("float32"))


def test_errors_name_tensor_and_file(checkpoint: Callable[[str], Checkpoint]) -> None:
    given = checkpoint("llama")
    policy = choose_policy("float32")
    name = "model.layers.1.mlp.down_proj.weight"

    def load(tensors: dict[str, Stored]) -> None:
        load_parameters(tensors, given.model, given.spec, policy)

    with pytest.raises(ConfigError, match=r'lacks "model\.layers\.1\.mlp\.down_proj\.weight".*tiny\.safetensors'):
        load({key: value for key, value in given.tensors.items() if key != name})
    with pytest.raises(ConfigError, match=r"lacks .* and \d+ more"):
        load({key: value for key, value in given.tensors.items() if "layers.1" not in key})
    with pytest.raises(ConfigError, match="looked in no file"):
        load({})
    with pytest.raises(ConfigError, match=r"tiny\.safetensors: .*down_proj.* shape \[48, 79\].* says \[48, 80\]"):
        load(given.tensors | {name: Stored(name, torch.zeros(48, 79))})
    with pytest.raises(ConfigError, match=r'no place for "model\.extra\.weight" of tiny\.safetensors'):
        load(given.tensors | {"model.extra.weight": Stored("model.extra.weight", torch.zeros(1))})
    load(given.tensors | {"x.rotary_emb.inv_freq": Stored("x.rotary_emb.inv_freq", torch.zeros(1))})


def test_values_that_are_not_numbers_are_refused(checkpoint: Callable[[str], Checkpoint]) -> None:
    given = checkpoint("llama")
    norm = given.model.names.final_norm
    broken = Stored(norm, torch.full((48,), torch.nan))
    parameters = load_parameters(given.tensors | {norm: broken}, given.model, given.spec, choose_policy("float32"))
    with pytest.raises(ConfigError, match=r"tiny\.safetensors: model\.norm\.weight holds NaN"):
        parameters.tensor(norm)


def test_expected_shapes_are_the_checkpoints(checkpoint: Callable[[str], Checkpoint]) -> None:
    for name in ("llama", "qwen2", "qwen3", "llama_tied_biased"):
        given = checkpoint(name)
        shapes = expected_shapes(given.spec, given.model.names)
        tied = {"lm_head.weight"} if given.spec.tie_embeddings else set()
        assert shapes == {key: value.shape for key, value in given.tensors.items() if key not in tied}
    without_layers = replace(given.spec, num_layers=0)
    assert len(expected_shapes(without_layers, given.model.names)) == 2
    check_tensors({}, {}, ())


def test_auto_keeps_the_untied_embedding_apart_from_the_head(make_tiny: Callable[[str], Any], tmp_path: Path) -> None:
    make_tiny("llama").reference.save_pretrained(tmp_path)
    source = open_model(str(tmp_path))
    _, model = find_model(["LlamaForCausalLM"])
    spec = model.read(Config(source.config))
    parameters = load_parameters(source.tensors, model, spec, choose_policy("auto"))
    table = parameters.weight(model.names.embedding)
    assert table.format_name == "none"
    rows = table.embed(torch.tensor([3, 3, 130]))
    assert rows.dtype == torch.float32
    expected = make_tiny("llama").reference.state_dict()[model.names.embedding][[3, 3, 130]]
    assert torch.equal(rows, expected.bfloat16().float())
