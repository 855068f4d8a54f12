"""Models without a checkpoint's weights: one whose prompts script its answers, one small enough to start at once."""

import json
from pathlib import Path

from tokenizers import AddedToken

from common import gguf_tokenizer
from common.gguf_metadata import read_gguf
from common.model_source import resolve
from tests.e2e.steered import Steered

MARK = "<|script|>"
# The last user message is the answer's script; a thinking template begins the reasoning itself.
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if loop.last %}{{ '<|script|>' + message.content + '<|script|>' }}{% else %}{{ message.content }}{% endif %}"
    "{%- for call in message.tool_calls or [] %}{{ call.function.name ~ call.function.arguments }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking %}{{ '<think>\n' }}{% endif %}"
)


# A Llama whose start costs what torch's import costs; its weights are drawn.
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def small(path: Path) -> tuple[str, ...]:
    """Settings of a system that serves SMALL with the bundled model's tokenizer and under its name."""
    path.mkdir()
    bundled = resolve("bundled").path
    tokenizer = gguf_tokenizer.build(read_gguf(bundled).metadata)
    tokenizer.save(str(path / "tokenizer.json"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    (path / "config.json").write_text(json.dumps(SMALL | {"vocab_size": size, "eos_token_id": 2}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    talk = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    (path / "chat_template.jinja").write_text(f"{talk}<|im_start|>assistant\n")
    return f"model.source={path}", "model.weights=random", "model.name=SmolLM2-135M-Instruct"


def folder(path: Path, dialect: str, special: tuple[str, ...] = ()) -> tuple[Path, int]:
    """A checkpoint without weights, and the id of MARK. `dialect` stands in the template, and tells it."""
    path.mkdir()
    tokenizer = gguf_tokenizer.build(read_gguf(resolve("bundled").path).metadata)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (MARK, *special)])
    tokenizer.save(str(path / "tokenizer.json"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    (path / "config.json").write_text(json.dumps({"model_type": "scripted", "vocab_size": size}))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": MARK}))
    (path / "chat_template.jinja").write_text(f"{{# {dialect} #}}{TEMPLATE}")
    mark = tokenizer.token_to_id(MARK)
    assert mark is not None
    return path, mark


def scripted(path: Path, dialect: str, special: tuple[str, ...] = (), *settings: str) -> Steered:
    source, mark = folder(path, dialect, special)
    null = (
        "worker.kind=null",
        f"worker.null_echo={mark}",
        "kv.blocks=512",
        "kv.prefix_cache=false",
        f"model.source={source}",
        "model.name=m",
    )
    return Steered(*null, *settings)
