from pathlib import Path

import pytest

from common.config import Config, fingerprint, load, render
from common.errors import ConfigError


def test_defaults_file_and_settings_in_order(tmp_path: Path) -> None:
    file = tmp_path / "valence.toml"
    file.write_text('[api]\nport = 9000\nhost = "0.0.0.0"\n[services.api]\nreplicas = 2\n')
    config = load(file, ["api.port=9001", "model.source=/models/x", 'worker.kernels=["torch"]', "log.level=debug"])
    assert (config.api.port, config.api.host, config.services.api.replicas) == (9001, "0.0.0.0", 2)
    assert (config.model.source, config.worker.kernels, config.log.level) == ("/models/x", ("torch",), "debug")
    assert config.kv == Config().kv


def test_the_rendered_tree_loads_to_itself(tmp_path: Path) -> None:
    config = load(None, ["api.port=9001", 'model.name="a \\"b\\" ü"', "kv.memory_gib=1.5"])
    file = tmp_path / "resolved.toml"
    file.write_text(render(config))
    assert load(file) == config
    assert fingerprint(load(file)) == fingerprint(config) != fingerprint(Config())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("api.prt=1", "unknown key api.prt; the nearest known key is api.port"),
        ("kv.block_token=1", "the nearest known key is kv.block_tokens"),
        ("api.port=70000", "api.port"),
        ("api.port=high", "api.port"),
        ("services.api.replicas=0", "services.api.replicas"),
        ("scheduler.policy=random", "scheduler.policy"),
        ("api=3", "api is a table"),
        ("api.port.x=3", "api.port"),
        ("nonsense", "written a.b=c"),
        ("model.source=\udcff", "valid Unicode"),
        ("api.port=" + "[" * 9999, "api.port"),
    ],
)
def test_bad_settings_name_the_key(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, [setting])


def test_bad_files_are_told_by_name(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("[api\n")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load(file)
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "absent.toml")
    file.write_text("a = " + "[" * 9999)
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load(file)


def test_the_tree_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().api.port = 1  # type: ignore[misc]


def test_the_run_directory_depends_on_the_port() -> None:
    assert load(None, ["api.port=1"]).run_dir != load(None, ["api.port=2"]).run_dir
    assert load(None, ["links.run_dir=/x"]).run_dir == Path("/x")
