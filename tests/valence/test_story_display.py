from pathlib import Path

import pytest
from rich.console import Console

from common import crash
from common.protocol import FinishReason
from common.recorder import Kind, file_name
from tests.valence.recorded import noted, seq
from valence.crashes import recordings
from valence.story import ask
from valence.story_display import clock, passed, show


def text_of(run_dir: Path, request: str, crashed: bool = False) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    with console.file:
        console.print(show(*ask(run_dir, request, crashed)))
    return console.export_text()


def test_a_story_is_read_from_top_to_bottom(tmp_path: Path) -> None:
    api = noted(tmp_path, "api", 1)
    api.requests.add(Kind.RECEIVED, seq(1), 2, 2_000_000, text=b"mine")
    api.requests.add(Kind.ANSWERED, seq(2), 64, 0, FinishReason.ERROR)
    lines = text_of(tmp_path, "mine").splitlines()
    assert lines[0].startswith("request mine   ") and lines[0].rstrip().endswith("2.00 s")
    assert "+0.0 ms  api-1  received mine" in lines[2] and "choice 0" in lines[2]
    assert "+2.00 s  api-1  answered: error, 64 tokens  choice 1" in lines[4]


def test_the_list_names_what_to_ask_for(tmp_path: Path) -> None:
    noted(tmp_path, "api", 1).requests.add(Kind.RECEIVED, seq(1), 1, 0, text=b"mine")
    text = text_of(tmp_path, "")
    assert "mine" in text and "open" in text and "valence story REQUEST" in text


def test_a_crash_shows_stack_events_and_what_came_after(tmp_path: Path) -> None:
    worker = noted(tmp_path, "worker", dead=True)
    worker.requests.add(Kind.ROW, seq(1), 4, 0, 2)
    peer = recordings(tmp_path)[0].peer
    (tmp_path / crash.FOLDER).mkdir()
    try:
        raise AssertionError("[bold]not markup[/]")
    except AssertionError as error:
        crash.Reporter(tmp_path / crash.FOLDER / file_name(peer, "json"), peer, "f00d", worker).write(error)
    noted(tmp_path, "scheduler", dead=True)
    text = text_of(tmp_path, "worker", crashed=True)
    assert "worker-0 (pid" in text and "AssertionError: [bold]not markup[/]" in text
    assert "tests/valence/test_story_display.py:" in text
    assert f"row in slot 2 from step 4, 0 tokens have KV  {seq(1):#018x}" in text
    assert "afterwards, by the supervisor" in text and "nothing is noted" in text
    assert "earlier" in text_of(tmp_path, "", crashed=True)


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "+0.0 ms"), (0.5, "+500 ms"), (61.5, "+61.50 s")])
def test_times_are_short(seconds: float, text: str) -> None:
    assert passed(seconds) == text
    assert clock(0.25).endswith(".250")
