"""A tiny GLM-4 mixture with a layer for multi-token prediction, which transformers does not have, and that layer alone.

Made from a model of one layer more: its last layer becomes the one for prediction.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.services.worker.tiny import Tiny, load_decoder, make_reference

LAYERS = 2
PREFIX = f"model.layers.{LAYERS}."


@dataclass
class MtpTiny:
    """`whole`: transformers' model with the last layer still in it."""

    folder: Path
    whole: Any
    own: dict[str, torch.Tensor]

    def tiny(self) -> Tiny:
        return Tiny(self.whole, self.folder, load_decoder(self.folder, mtp=True))

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """The model's states before its head, [T, N]."""
        inner = self.whole.model
        x = inner.embed_tokens(torch.tensor([tokens]))
        for layer in inner.layers[:LAYERS]:
            x = self._through(layer, x)
        return inner.norm(x)[0]

    def further(self, tokens: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens: those after the positions of `hidden`, one each. States and logits by DeepSeek-V3's report, 2.2."""
        inner = self.whole.model

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.whole.config.rms_norm_eps)
            return x * self.own[name]

        embedded = norm(inner.embed_tokens(torch.tensor(tokens)), "enorm.weight")
        joined = torch.cat((embedded, norm(hidden, "hnorm.weight")), -1) @ self.own["eh_proj.weight"].T
        states = norm(self._through(inner.layers[LAYERS], joined[None])[0], "shared_head.norm.weight")
        return states, self.whole.lm_head(states)

    def _through(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotation = self.whole.model.rotary_emb(x, positions)
        out = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return out[0] if isinstance(out, tuple) else out


def make_mtp(folder: Path) -> MtpTiny:
    whole = make_reference("Glm4MoeForCausalLM")
    assert len(whole.model.layers) == LAYERS + 1
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    size = whole.config.hidden_size
    generator = torch.Generator().manual_seed(8)
    own = {
        name: torch.rand(size, generator=generator) + 0.5
        for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    }
    own["eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) * 0.2
    repeated = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    tensors |= {PREFIX + name: values for name, values in {**own, **repeated}.items()}
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config))
    return MtpTiny(folder, whole, own)
