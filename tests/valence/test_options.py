import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from valence.options import load_config, print_listing


def test_settings_come_after_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[api]\nport = 7\nhost = "::1"\n')
    config = load_config(str(file), ["api.port=9"])
    assert (config.api.port, config.api.host) == (9, "::1")
    with pytest.raises(ConfigError, match=r"unknown key api\.prt"):
        load_config(str(file), ["api.prt=9"])


def test_a_listing_is_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "ann", "requests": 4}]
    print_listing(rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == rows
    print_listing(rows, as_json=False)
    assert "ann" in capsys.readouterr().out
