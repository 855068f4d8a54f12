import json
from pathlib import Path

import pytest
import torch

from services.worker import profile
from services.worker.profile import Profile


def test_what_ran_between_is_in_the_file(tmp_path: Path) -> None:
    made = Profile(tmp_path / "profiles")
    made.step()
    torch.ones(3) @ torch.ones(3)
    assert made.file is not None
    file = made.file
    made.end()
    made.end()
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert "aten::dot" in names and made.file is None


def test_it_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "MOST_STEPS", 2)
    made = Profile(tmp_path)
    for _ in range(2):
        made.step()
    assert made.file is not None
    made.step()
    assert made.file is None and len(list(tmp_path.iterdir())) == 1 and made.folder == tmp_path


def test_without_a_folder_or_a_place_for_it_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file" / "folder"):
        made = Profile(folder)
        made.step()
        made.end()
        assert made.file is None
