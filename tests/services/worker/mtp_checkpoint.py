"""Tiny models with a layer for multi-token prediction, which transformers does not have, and that layer alone.

Made from a model of one layer more: its last layer becomes the one for prediction, under the names of the family's
published checkpoints. What it is held against is transformers' own layer, between norms and a projection of the tests.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.services.worker.tiny import MTP, Tiny, load_decoder, make_reference, reference_class, small_config

LAYERS = 2
PREFIX = f"model.layers.{LAYERS}."
GLM = "Glm4MoeForCausalLM"
NORMS = ("enorm", "hnorm", "shared_head.norm")
LIKE_GLM = {
    **{f"{norm}.weight": f"{PREFIX}{norm}.weight" for norm in NORMS},
    "eh_proj.weight": f"{PREFIX}eh_proj.weight",
}
# what a family's checkpoints call the head's own tensors, and its layer's
FAMILIES: dict[str, tuple[dict[str, str], Callable[[str], str]]] = {
    **dict.fromkeys(
        [GLM, "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"], (LIKE_GLM, lambda name: name)
    ),
    "Qwen3NextForCausalLM": (
        {
            "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
            "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
            "shared_head.norm.weight": "mtp.norm.weight",
            "eh_proj.weight": "mtp.fc.weight",
        },
        lambda name: name.replace(PREFIX, "mtp.layers.0."),
    ),
    "MiMoV2FlashForCausalLM": (
        {
            "enorm.weight": "model.mtp.layers.0.enorm.weight",
            "hnorm.weight": "model.mtp.layers.0.hnorm.weight",
            "shared_head.norm.weight": "model.mtp.layers.0.final_layernorm.weight",
            "eh_proj.weight": "model.mtp.layers.0.eh_proj.weight",
        },
        lambda name: name.replace(f"{PREFIX}post_attention_", f"{PREFIX}pre_mlp_").replace(
            PREFIX, "model.mtp.layers.0."
        ),
    ),
}
# the last layer attends in full, or in a window and without experts
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "MiMoV2FlashForCausalLM": {"mlp_layer_types": ["dense", "sparse", "dense"]},
}
BY_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "hybrid_layer_pattern", "moe_layer_freq")


@dataclass
class MtpTiny:
    """`whole`: transformers' model with the last layer still in it."""

    folder: Path
    whole: Any
    own: dict[str, torch.Tensor]

    def tiny(self) -> Tiny:
        return Tiny(self.whole, self.folder, load_decoder(self.folder, speculative=MTP))

    @cached_property
    def _trunk(self) -> Any:
        return self._part(slice(LAYERS), self.whole.model.norm.weight)

    @cached_property
    def _head(self) -> Any:
        return self._part(slice(LAYERS, None), self.own["shared_head.norm.weight"])

    def _part(self, layers: slice, norm: torch.Tensor) -> Any:
        """Some of the layers, and then a norm."""
        inner = copy.deepcopy(self.whole.model)
        inner.layers = inner.layers[layers]
        inner.config.num_hidden_layers = len(inner.layers)
        for key in BY_LAYER:
            if getattr(inner.config, key, None) is not None:
                setattr(inner.config, key, getattr(inner.config, key)[layers])
        inner.norm.weight.data = norm
        return inner

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        norm = copy.deepcopy(self.whole.model.norm)
        norm.weight.data = self.own[name]
        return torch.as_tensor(norm(x))

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """The model's states before its head, [T, N]."""
        return torch.as_tensor(self._trunk(torch.tensor([tokens]), use_cache=False).last_hidden_state[0])

    def further(self, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens: those after the positions of `hidden`, one each. States and logits by DeepSeek-V3's report, 2.2."""
        embedded = self._norm(self.whole.model.embed_tokens(torch.tensor(tokens)), "enorm.weight")
        joined = torch.cat((embedded, self._norm(hidden, "hnorm.weight")), -1) @ self.own["eh_proj.weight"].T
        states = self._head(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
        return states, self.whole.lm_head(states)


def make_mtp(folder: Path, architecture: str = GLM) -> MtpTiny:
    kind = reference_class(architecture)
    changes = small_config(kind.config_class).to_dict() | KINDS.get(architecture, {})
    whole = make_reference(architecture, kind.config_class(**changes))
    assert len(whole.model.layers) == LAYERS + 1
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    size = whole.config.hidden_size
    generator = torch.Generator().manual_seed(8)
    own = {f"{norm}.weight": torch.rand(size, generator=generator) + 0.5 for norm in NORMS}
    own["eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) * 0.2
    names, stored = FAMILIES[architecture]
    tensors = {stored(name): values for name, values in tensors.items()}
    tensors |= {names[name]: values for name, values in own.items()}
    if names is LIKE_GLM:
        tensors[PREFIX + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[PREFIX + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {key: config[key][:LAYERS] for key in BY_LAYER if config.get(key) is not None}
    path.write_text(json.dumps(config | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}))
    return MtpTiny(folder, whole, own)
