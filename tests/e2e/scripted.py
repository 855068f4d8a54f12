"""A model whose prompts script their answers (`worker.null_echo`), with a real tokenizer and a template of a family."""

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
