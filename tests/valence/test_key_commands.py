import json
from pathlib import Path

from typer.testing import CliRunner

from valence.__main__ import app


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["keys", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


def test_the_life_of_a_key(tmp_path: Path) -> None:
    file = "--file", tmp_path / "keys"
    assert len(run("add", "ann", "--requests", "4", "--admin", *file).split()) == 1
    run("set", "ann", "--weight", "3", *file)
    (ann,) = json.loads(run("list", "--json", *file))
    assert (ann["name"], ann["requests"], ann["weight"], ann["admin"]) == ("ann", 4, 3, True)
    run("remove", "ann", *file)
    assert json.loads(run("list", "--json", *file)) == []


def test_a_file_must_be_named() -> None:
    result = CliRunner().invoke(app, ["keys", "list"])
    assert result.exit_code == 1 and "no file of keys is named" in str(result.exception)
