import json
from pathlib import Path

from typer.testing import CliRunner

from valence.__main__ import app


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["keys", "links", *map(str, arguments)])
    assert (result.exit_code == 0) == (status == 0), result.output
    return result.output


def test_the_life_of_a_folder(tmp_path: Path) -> None:
    keys, other = tmp_path / "keys", tmp_path / "other"
    assert str(keys) in run("init", keys, "--host", "one")
    first = json.loads(run("show", keys, "--json"))
    assert [row["host"] for row in first] == ["all", "one"]
    assert "two" in run("add", keys, "two", "--out", other)
    assert "two" in run("show", keys)
    run("remove", keys, "two")
    assert "two" not in run("show", keys)
    run("rotate", keys, "--host", "one")
    assert {row["fingerprint"] for row in first}.isdisjoint(
        row["fingerprint"] for row in json.loads(run("show", keys, "--json"))
    )
    run("init", keys, status=1)
