"""Tables of launch geometry: written as they are read."""

from pathlib import Path

import torch

from services.worker.kernels.tuned import FOLDER, read, table, write


def test_a_written_table_is_read_again(tmp_path: Path) -> None:
    rows = [{"rows": 1, "out": 8, "path": "vector"}, {"rows": 16, "out": 8, "path": "apart", "us": 1.5}]
    path = write("linear", "sm_90", "by hand", rows, tmp_path)
    assert path == tmp_path / "linear.sm_90.json"
    assert read("linear", "sm_90", tmp_path) == tuple(rows)
    assert len(path.read_text().splitlines()) == 1 + len(rows) + 1
    write("linear", "sm_90", "by hand", rows[:1], tmp_path)
    assert read("linear", "sm_90", tmp_path) == tuple(rows[:1]), "what the next section of a tuner adds to"


def test_without_a_table_there_are_no_rows(tmp_path: Path) -> None:
    assert read("linear", "sm_90", tmp_path) == ()
    assert table("linear", torch.device("cpu")) == ()


def test_every_table_of_this_build_can_be_read() -> None:
    for path in FOLDER.glob("*.json"):
        op, name = path.name.removesuffix(".json").split(".")
        assert read(op, name), path.name
