"""What the worker opens is what the tokenizer service opens; services/tokenizer/test_source.py has the rest."""

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model_source import ModelFiles, resolve
from common.tokenizer_files import open_tokenizer
from common.vocabulary import build


def test_a_folder_as_its_gguf_file(tmp_path: Path) -> None:
    from_file = open_tokenizer(resolve("bundled"), False)
    assert from_file.specials["eos_token"] == "<|im_end|>" and "default" in from_file.templates
    from_file.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    from_folder = open_tokenizer(ModelFiles("folder", tmp_path, "m"), False)
    assert from_folder.templates == {"default": "x"} and from_folder.specials == {"eos_token": "<|im_end|>"}
    assert build(from_folder.tokenizer).pieces == build(from_file.tokenizer).pieces
    assert from_folder.tokenizer.truncation is None and from_folder.tokenizer.padding is None


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        open_tokenizer(ModelFiles("folder", tmp_path, "m"), False)
