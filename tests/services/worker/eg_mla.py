"""EG-MLA (arXiv 2509.16686) from its equations, without a cache, as a model that transformers can make and save.

What the paper leaves open is as services/worker/models/eg_mla.py says. Nothing of ours is used.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel


class EgMlaConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "eg_mla"

    def __init__(self, **values: Any) -> None:
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        heads = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 16}
        other = {"vocab_size": 32, "max_position_embeddings": 64, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
        more = {"gate_embedding_dim": 14, "initializer_range": 0.2, "tie_word_embeddings": False}
        known = {**sizes, **heads, **other, **more, "num_key_value_heads": None}
        for key, default in known.items():
            setattr(self, key, values.pop(key, default))
        super().__init__(**values)


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weight


def rotated(x: Tensor) -> Tensor:
    """Pairs side by side, as complex numbers; x: [tokens, ..., even]."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x)).float()[:, None] * 1e4 ** -(torch.arange(half).float() / half)
    turn = torch.polar(torch.ones_like(angle), angle).view(len(x), *[1] * (x.dim() - 2), half)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * turn).flatten(-2)


class Attention(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.sizes = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        heads, nope, rope, value = self.sizes
        both = heads * (nope + value)
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = Norm(c.q_lora_rank)
        self.q_b_proj = nn.Linear(c.q_lora_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + rope, bias=False)
        self.kv_a_layernorm = Norm(c.kv_lora_rank)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, both, bias=False)
        self.gate_embed = nn.Embedding(c.vocab_size, c.gate_embedding_dim)
        self.gate_b_proj = nn.Linear(c.gate_embedding_dim, both, bias=False)
        self.kv_layernorm = nn.LayerNorm(both)
        self.o_proj = nn.Linear(heads * value, c.hidden_size, bias=False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        heads, nope, rope, value = self.sizes
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (heads, nope + rope))
        q = torch.cat((q[..., :nope], rotated(q[..., nope:])), -1)
        latent, key = self.kv_a_proj_with_mqa(x).split((self.kv_b_proj.in_features, rope), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)) * self.gate_b_proj(self.gate_embed(ids))
        kv = self.kv_layernorm(kv).unflatten(-1, (heads, nope + value))
        k = torch.cat((kv[..., :nope], rotated(key)[:, None].expand(-1, heads, -1)), -1)
        scores = torch.einsum("thd,shd->hts", q, k) * (nope + rope) ** -0.5
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.o_proj(torch.einsum("hts,shd->thd", shares, kv[..., nope:]).flatten(1))


class Mlp(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden_size), Norm(c.hidden_size)
        self.self_attn, self.mlp = Attention(c), Mlp(c)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), ids)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size)


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class EgMlaForCausalLM(PreTrainedModel):  # type: ignore[misc]
    config_class = EgMlaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor) -> Output:
        (ids,) = input_ids
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, ids)
        return Output(self.lm_head(self.model.norm(x))[None])
