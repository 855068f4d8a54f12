import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common import gguf_tokenizer
from common.config import Model
from common.errors import ConfigError
from common.vocabulary import byte_alphabet
from services.tokenizer.encode import Encoder
from services.tokenizer.source import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a tokenizer of 256 bytes, <s> (256) and </s> (257)."""
    vocab = {chr(code): ord(byte) for code, byte in byte_alphabet().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "config.json", {"model_type": "llama"})
    return tmp_path


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def rendered(folder: Path, kwargs: bytes = b"") -> str:
    template = load(Model(source=str(folder))).template
    assert template is not None
    return template.render(b"[]", kwargs, True, 100)


def test_bundled_model() -> None:
    loaded = load(Model())
    assert loaded.vocabulary.size == 49152 and loaded.template is not None
    assert loaded.tokenizer.encode("hi").ids == [6004]


def test_folder_gives_the_same_ids_as_the_file(folder: Path, smollm: Tokenizer) -> None:
    smollm.save(str(folder / "tokenizer.json"))
    text = "def f(x): return 123  # naïve 😀 <|im_start|>"
    loaded = load(Model(source=str(folder)))
    assert loaded.tokenizer.encode(text).ids == smollm.encode(text).ids
    assert loaded.template is None and "no chat template" in loaded.no_template


def test_special_tokens_of_the_settings_are_added(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"pad_token": "<|pad|>"})
    loaded = load(Model(source=str(folder)))
    assert loaded.tokenizer.encode("<|pad|>").ids == [258]
    assert 258 in loaded.vocabulary.special


def test_templates_from_each_place(folder: Path) -> None:
    settings = {"bos_token": "<s>", "chat_template": "config {{ bos_token }}"}
    write(folder, "tokenizer_config.json", settings)
    assert rendered(folder) == "config <s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert rendered(folder) == "plain"
    assert rendered(folder, b'{"tools": [1]}') == "tools"
    write(folder, "chat_template.jinja", "file")
    assert rendered(folder) == "file"
    (folder / "tokenizer_config.json").unlink()
    write(folder, "chat_template.json", {"chat_template": "json"})
    (folder / "chat_template.jinja").unlink()
    assert rendered(folder) == "json"


def test_template_that_does_not_compile_only_ends_chats(folder: Path) -> None:
    write(folder, "chat_template.jinja", "{% for %}")
    loaded = load(Model(source=str(folder)))
    assert loaded.template is None and "cannot be compiled" in loaded.no_template


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[" * 99_999),
    ],
)
def test_damaged_files_are_named(folder: Path, name: str, content: str) -> None:
    write(folder, name, content)
    with pytest.raises(ConfigError, match=name):
        load(Model(source=str(folder)))


def test_an_error_of_a_table_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    with pytest.raises(ConfigError, match=r"odd\.gguf: the GGUF file holds no tokenizer"):
        load(Model(source=str(path)))


def test_templates_that_are_none_are_left_out(folder: Path) -> None:
    entries = ["x", {"name": "default"}, {"name": 1, "template": "x"}, {"name": "default", "template": "good"}]
    write(folder, "tokenizer_config.json", json.dumps({"chat_template": entries}))
    assert rendered(folder) == "good"


def test_a_template_file_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        load(Model(source=str(folder)))


def test_settings_of_truncation_and_padding_do_not_apply(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(load(Model(source=str(folder))).tokenizer.encode("four").ids) == 4


TEMPLATE = """
{%- set state = namespace(system="none") -%}
{%- for message in messages if message.role == "system" %}{% set state.system = message.content %}{% endfor -%}
{{ bos_token }}[{{ state.system | trim }}]
{% if tools %}
    {% for tool in tools %}
{{ tool | tojson(indent=2) }}
    {% endfor %}
{% endif %}
{% for message in messages %}
    {% if message.role == "system" %}{% continue %}{% endif %}
<{{ message["role"] }}>{{ message.content }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if thinking is defined and thinking %}<think>{% endif %}{% endif %}
"""


def test_rendering_and_framing_equal_transformers(folder: Path) -> None:
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    write(folder, "tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    write(folder, "chat_template.jinja", TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    gguf_tokenizer.set_frame(tokenizer, "<s>", None)
    tokenizer.save(str(folder / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
    ours = load(Model(source=str(folder)))
    assert ours.template is not None
    messages = [
        {"role": "system", "content": " Be brief & <kind> "},
        {"role": "user", "content": "2 > 1? 日本 'quoted'"},
        {"role": "assistant", "content": "yes"},
    ]
    tools = [{"type": "function", "function": {"name": "é<f>", "parameters": {"b": 1, "a": [True, None]}}}]
    for kwargs in ({}, {"tools": tools}, {"thinking": True}):
        for prompt in (True, False):
            text = ours.template.render(json.dumps(messages).encode(), json.dumps(kwargs).encode(), prompt, 10_000)
            assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **kwargs)
    for text in ("hello", "<s>hello</s>", ""):
        assert ours.tokenizer.encode(text).ids == theirs(text)["input_ids"]


def test_sentencepiece_folder_is_converted(tmp_path: Path, sentencepiece_model: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    write(tmp_path, "config.json", {"model_type": "llama"})
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})
    loaded = load(Model(source=str(tmp_path)))
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    for text in ("the end of the day", "Größe 12 日本 😀", "two  spaces "):
        expected = processor.encode(text)
        assert loaded.tokenizer.encode(text).ids == [processor.bos_id(), *expected]
        assert loaded.vocabulary.decode(expected) == text


def test_folder_without_any_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "llama"})
    with pytest.raises(ConfigError, match="tokenizer"):
        load(Model(source=str(tmp_path)))
    shutil.rmtree(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        load(Model(source=str(tmp_path)))


def test_a_tokenizer_that_is_code_of_its_own_is_refused_with_what_to_do(folder: Path) -> None:
    """As Kimi-K2's: a tiktoken file and a class beside it."""
    (folder / "tokenizer.json").unlink()
    write(
        folder, "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    )
    with pytest.raises(
        ConfigError, match=r"tokenization_kimi\.TikTokenTokenizer.*TikTokenConverter.*trust_remote_code"
    ):
        load(Model(source=str(folder)))


def test_what_there_is_to_say_about_a_tokenizer(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"eos_token": "<end>", "chat_template": "{{ messages }}"})
    about = json.loads(Encoder(load(Model(source=str(folder))), 100).describe())
    assert about.keys() >= {"tokenizer_class", "eos_token", "bos_token", "pad_token", "chat_template"}
    assert (about["eos_token"], about["chat_template"]) == ("<end>", "{{ messages }}")
