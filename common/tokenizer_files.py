"""Opens a model's tokenizer: from a GGUF file, a folder's tokenizer.json, or through transformers.

The tokenizer service and the worker (which must know the bytes of each token) call `open_tokenizer` for the same files
and get the same tokens. transformers takes seconds to import, so it is only loaded for folders without tokenizer.json.
"""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from common import gguf_tokenizer
from common.config import Model
from common.dialects.registry import Dialects, choose
from common.errors import ConfigError
from common.gguf_metadata import read_gguf
from common.model_source import ModelFiles

log = logging.getLogger("tokenizer")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

CONVERT = (
    "write a tokenizer.json into the folder (of a tiktoken.model, with the pattern and special tokens of its code, "
    "transformers.convert_slow_tokenizer.TikTokenConverter makes one)"
)


class Opened(NamedTuple):
    """A tokenizer, its special tokens by name, and chat templates by name."""

    tokenizer: Tokenizer
    specials: dict[str, str]
    templates: dict[str, str]


def open_tokenizer(files: ModelFiles, trust_remote_code: bool) -> Opened:
    """Raises ConfigError when there is none that can be used."""
    if files.kind == "gguf":
        found = _from_gguf(files.path)
    elif (files.path / "tokenizer.json").is_file():
        found = _from_folder(files.path)
    else:
        found = _from_transformers(files, trust_remote_code)
    found.tokenizer.no_truncation()
    found.tokenizer.no_padding()
    return found


def dialects_of(files: ModelFiles, model: Model, opened: Opened) -> Dialects:
    """What the model's answers are written in. Raises ConfigError."""
    model_type = "" if files.kind == "gguf" else str(read_json(files.path / "config.json").get("model_type") or "")
    return choose(model.tool_parser, model.reasoning_parser, opened.templates.values(), model_type)


def _from_gguf(path: Path) -> Opened:
    metadata = read_gguf(path).metadata
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        name = key.removeprefix("tokenizer.chat_template")
        if name != key and isinstance(value, str):
            templates[name.removeprefix(".") or "default"] = value
    return Opened(gguf_tokenizer.build(metadata), gguf_tokenizer.special_tokens(metadata), templates)


def _from_folder(folder: Path) -> Opened:
    """A folder with tokenizer.json, which says all of how text becomes ids; tokenizer_config.json only names tokens.

    As in transformers 5, `add_bos_token` of tokenizer_config.json does not count beside a tokenizer.json.
    """
    try:
        tokenizer = Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'tokenizer.json'}: {error}") from error
    settings = read_json(folder / "tokenizer_config.json")
    specials = _special_names(read_json(folder / "special_tokens_map.json") | settings)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens([token for token in dict.fromkeys(specials.values()) if token not in added])
    return Opened(tokenizer, specials, _templates(folder, settings))


def _from_transformers(files: ModelFiles, trust_remote_code: bool) -> Opened:
    from transformers import AutoTokenizer  # takes seconds

    own = read_json(files.path / "tokenizer_config.json").get("auto_map")
    if own and not trust_remote_code:
        raise ConfigError(
            f"the tokenizer in {files.path} is code of its own (auto_map of tokenizer_config.json: {own}) and there is "
            f"no tokenizer.json: {CONVERT}, or let that code run with model.trust_remote_code=true"
        )
    if trust_remote_code:
        log.warning("model.trust_remote_code: code that comes with %s may run in this process", files.path)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(files.path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise ConfigError(f"no usable tokenizer in {files.path}: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        kind = type(tokenizer).__name__
        raise ConfigError(f"the tokenizer in {files.path} ({kind}) has no fast form, which is needed here: {CONVERT}")
    specials = {name: value for name in SPECIAL_NAMES if isinstance(value := getattr(tokenizer, name, None), str)}
    return Opened(backend, specials, _templates(files.path, read_json(files.path / "tokenizer_config.json")))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return found


def _special_names(settings: dict[str, Any]) -> dict[str, str]:
    """Named special tokens; each is a string or an object with its `content`."""
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Templates by name. chat_template.jinja goes before tokenizer_config.json, whose entry may be a list."""
    value = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict)]
        pairs = [(entry.get("name"), entry.get("template")) for entry in named]
        templates = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in paths.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: {error}") from error
    return templates
