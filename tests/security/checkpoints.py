"""Model folders that an attacker could offer. Small, and whole enough for the tokenizer and the null worker."""

import json
from pathlib import Path
from typing import Any

from common import gguf_tokenizer
from common.gguf_metadata import read_gguf
from common.model_source import resolve

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152}


def make(folder: Path, template: str = "", config: dict[str, Any] | None = None) -> Path:
    """The bundled model's tokenizer with another chat template."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    metadata = dict(read_gguf(resolve("bundled").path).metadata)
    gguf_tokenizer.build(metadata).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
