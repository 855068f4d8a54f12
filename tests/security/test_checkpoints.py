"""Checkpoints from anybody: weights only from safetensors and GGUF, no code of theirs, nothing outside their folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.config import Config, Model
from common.errors import ConfigError
from common.model_source import resolve
from services.tokenizer.source import load
from services.worker.source import open_model
from tests.security import checkpoints

CANARY = "remote code has run"
CODE = f"print({CANARY!r}, flush=True)\nopen('ran', 'w').close()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = checkpoints.make(tmp_path / "model", "{{ messages[0].content }}")
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Something that a checkpoint has no business with."""
    (tmp_path / "outside").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "outside" / "model.safetensors")
    (tmp_path / "outside" / "secret.json").write_text('{"secret": 1}')
    return tmp_path / "outside"


def both(folder: Path, match: str) -> None:
    """Worker and tokenizer refuse it with the same words."""
    for use in (lambda: open_model(str(folder)), lambda: load(Model(source=str(folder)))):
        with pytest.raises(ConfigError, match=match):
            use()


def test_a_good_one_is_opened(folder: Path) -> None:
    assert set(open_model(str(folder)).tensors) == {"a"}
    assert load(Model(source=str(folder))).template is not None


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_opened(folder: Path, name: str) -> None:
    """The file would run code if anything loaded it."""
    (folder / "model.safetensors").unlink()
    payload = b'cbuiltins\nexec\n(S\'open("ran","w")\'\ntR.'
    (folder / name).write_bytes(payload)
    with pytest.raises(ConfigError, match=f"{name} is a pickle.*never opened"):
        open_model(str(folder))
    (folder / "model.safetensors").write_bytes(payload)
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        open_model(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_a_link_that_leads_out_is_refused(folder: Path, outside: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside / "secret.json")
    both(folder, f"{name} is a link to .*outside the model's folder")


def test_a_linked_folder_and_a_chain_of_links_are_refused(folder: Path, outside: Path) -> None:
    (folder / "additional_chat_templates").symlink_to(outside)
    both(folder, "outside the model's folder")
    (folder / "additional_chat_templates").unlink()
    (folder / "one").symlink_to(folder / "two")
    (folder / "two").symlink_to("../outside/secret.json")
    both(folder, "outside the model's folder")


def test_links_within_and_the_hubs_cache_are_fine(folder: Path, tmp_path: Path) -> None:
    (folder / "copy.json").symlink_to("config.json")
    assert set(open_model(str(folder)).tensors) == {"a"}
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    blobs = tmp_path / "models--owner--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(folder.iterdir()):
        if not file.is_symlink():
            file.rename(blobs / str(number))
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert set(open_model(str(snapshot)).tensors) == {"a"}
    (snapshot / "extra").symlink_to("/etc/passwd")
    both(snapshot, "outside the model's folder")


def test_what_is_no_file_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "generation_config.json")
    both(folder, "neither a file nor a folder")


@pytest.mark.parametrize(
    "file",
    ["../outside/model.safetensors", "/etc/passwd", "..", ".", "", "a/../b.safetensors", "x\0.safetensors", "x.bin", 3],
)
def test_an_index_names_files_of_its_folder_only(folder: Path, outside: Path, file: object) -> None:
    index = {"weight_map": {"a": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="not a name in this folder"):
        open_model(str(folder))


def test_files_that_nest_without_end_are_told(folder: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        kept = (folder / name).read_bytes() if (folder / name).exists() else b""
        (folder / name).write_text("[" * 100_000)
        with pytest.raises(ConfigError, match="cannot be read"):
            open_model(str(folder))
        (folder / name).write_bytes(kept) if kept else (folder / name).unlink()
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="tokenizer_config"):
        load(Model(source=str(folder)))


def test_nothing_outside_is_opened(folder: Path, outside: Path) -> None:
    """Watched by the interpreter's own audit."""
    (folder / "special_tokens_map.json").symlink_to(outside / "secret.json")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../outside/model.safetensors"}}')
    code = f"""
import sys
from common.config import Model
from common.errors import ConfigError
from services.tokenizer.source import load
from services.worker.source import open_model
from services.worker.safetensors_file import read_folder
from pathlib import Path
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
for use in (lambda: open_model({str(folder)!r}), lambda: load(Model(source={str(folder)!r})),
            lambda: read_folder(Path({str(folder)!r}))):
    try:
        use()
    except ConfigError:
        continue
    raise SystemExit("it was not refused")
print([path for path in opened if "/outside/" in path or "special_tokens_map" in path])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.fixture
def with_code(folder: Path) -> Path:
    """Its model and its tokenizer want Python files of its own."""
    (folder / "tokenizer.json").unlink()
    (folder / "modeling_own.py").write_text(CODE)
    (folder / "tokenization_own.py").write_text(CODE)
    names = {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    config = {"architectures": ["OwnForCausalLM"], "model_type": "own", "vocab_size": 9, "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.T", "tokenization_own.F"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder


def run(folder: Path, code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder.parent)
    return done.stdout + done.stderr


@pytest.mark.parametrize("trusted", [False, True])
def test_a_tokenizer_with_code_of_its_own_runs_only_where_that_is_trusted(with_code: Path, trusted: bool) -> None:
    """And then the log says so."""
    code = f"""
import logging
logging.basicConfig(level=logging.WARNING)
from common.config import Model
from common.errors import ConfigError
from services.tokenizer.source import load
try:
    load(Model(source={str(with_code)!r}, trust_remote_code={trusted}))
except ConfigError as error:
    print("refused:", error)
"""
    output = run(with_code, code)
    assert (CANARY in output) == trusted, output
    assert (with_code.parent / "ran").exists() == trusted
    if trusted:
        assert "model.trust_remote_code: code that comes with" in output
    else:
        assert "refused: the tokenizer in" in output and "code of its own" in output and "trust_remote_code" in output


def test_a_model_with_code_of_its_own_is_refused_whatever_is_trusted(with_code: Path) -> None:
    from services.worker.model_engine import load_model

    source = open_model(str(with_code))
    config = Config(model=Model(source=str(with_code), trust_remote_code=True))
    with pytest.raises(ConfigError, match=r"OwnForCausalLM is not supported.*auto_map.*never run"):
        load_model(source, config, torch.device("cpu"), lambda *_: None, 0)
    assert not Path("ran").exists()


def test_a_folder_of_everything_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.model_source.MAX_ENTRIES", 10)
    (tmp_path / "config.json").write_text("{}")
    for number in range(12):
        (tmp_path / str(number)).touch()
    with pytest.raises(ConfigError, match="more than 10 files"):
        resolve(str(tmp_path))
