import errno
import io
import json
import shlex
from pathlib import Path

from rich.console import Console

from common.protocol import Load, Member, ModelFacts, Peer, Progress, Status
from valence import display
from valence.display import Stage, StartDisplay


def member(service: str, stage: Progress | None = None) -> Member:
    return Member(Peer(service, 0, 1, "ipc://x"), "starting", stage=stage)


def test_stages_are_what_the_members_report() -> None:
    status = Status([member("api"), member("worker", Progress("weights", 3, 9))], Load(), None)
    assert display.stages(status, 4) == [Stage("processes", 2, 4), Stage("worker-0: weights", 3, 9)]


def written(terminal: bool, *moments: list[Stage]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None)
    with StartDisplay(console) as bars:
        for moment in moments:
            bars.show(moment)
        bars.complete()
    return out.getvalue()


def test_bars_on_a_terminal_end_complete() -> None:
    text = written(True, [Stage("weights", 3, 9)], [Stage("warm-up", 0, 0)])
    assert "3/9" in text
    last = text.split("weights")[-1]
    assert "9/9" in last
    assert "warm-up" in last


def test_one_line_per_stage_elsewhere() -> None:
    text = written(False, [Stage("weights", 3, 9)], [Stage("weights", 9, 9)], [Stage("warm-up", 1, 2)])
    assert text.split() == ["weights", "warm-up"]


def test_the_example_survives_a_shell() -> None:
    words = shlex.split(display.example_request("http://127.0.0.1:8000", "it's a model"))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's a model"
    keyed = display.example_request("http://127.0.0.1:8000", "tiny", keyed=True)
    assert '-H "Authorization: Bearer $VALENCE_API_KEY" -d' in keyed


def test_the_announcement_names_what_a_person_needs(tmp_path: Path) -> None:
    out = io.StringIO()
    model = ModelFacts("tiny", "Llama", 100, 8192, (2,), 16, 1000, dtype="float32", kv_dtype="float8_e4m3fn")
    display.announce(Console(file=out, width=40), "http://127.0.0.1:8000", model, tmp_path, ".venv/bin/valence", 5.25)
    text = out.getvalue()
    assert "Ready after 5.2 s: tiny (Llama, float32), at most 8,192 tokens per request" in text
    assert "KV cache: 1,000 blocks of 16 tokens, 16,000 in all, in float8_e4m3fn\n" in text
    assert str(tmp_path) in text
    assert ".venv/bin/valence chat" in text
    assert display.example_request("http://127.0.0.1:8000", "tiny") + "\n" in text  # on one line, however narrow


def test_the_table_shows_processes_requests_and_blocks() -> None:
    document = {
        "model": None,
        "ready": False,
        "processes": [
            {"service": "worker", "instance": 0, "pid": None, "state": "backoff", "since": 40.0, "reason": ""}
        ],
        "schedulers": [{"instance": i, "running": i, "waiting": 0} for i in (0, 1)],
        "requests": {"running": 3, "waiting": 4},
        "kv": {"blocks_total": 100, "blocks_free": 60, "blocks_cached": 30},
    }
    out = io.StringIO()
    Console(file=out, width=100).print(display.status_table(document, now_s=100.0))
    assert "scheduler-1: 1 running, 0 waiting" in out.getvalue()
    text = out.getvalue()
    for part in ("no model yet: not ready", "backoff", "60 s", "3 running, 4 waiting", "10 used, 30 cached, 60 free"):
        assert part in text


def test_the_table_says_why_a_process_is_not_well() -> None:
    row = {"service": "worker", "instance": 0, "pid": 7, "state": "stalled", "since": 40.0}
    document = {
        "model": None,
        "ready": False,
        "processes": [{**row, "reason": "nothing done for 70 s, 2 waiting"}],
        "schedulers": [],
        "requests": {"running": 0, "waiting": 0},
        "kv": {"blocks_total": 0, "blocks_free": 0, "blocks_cached": 0},
    }
    out = io.StringIO()
    Console(file=out, width=100).print(display.status_table(document, now_s=100.0))
    for part in ("why", "stalled", "nothing done for 70 s, 2 waiting"):
        assert part in out.getvalue()


def test_listings_of_any_records() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(display.listing_table([{"op": "linear", "features": ["a", "b"]}]))
    assert "linear" in out.getvalue()
    assert "a, b" in out.getvalue()
    assert display.listing_table([]).row_count == 0


def test_durations() -> None:
    seconds = (0, 59.9, 119, 121, 3 * 3600 + 300, -5)
    assert [display.duration(s) for s in seconds] == ["0 s", "59 s", "119 s", "2 min", "3 h 05 min", "0 s"]


def test_tail_reads_only_the_end(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert display.tail(file, 2) == ["line 99998", "line 99999"]
    assert display.tail(tmp_path / "none", 2) == []


def test_lines_that_cannot_be_written_are_lost_and_later_ones_are_not() -> None:
    class Disk(io.StringIO):
        full = True

        def flush(self) -> None:
            if self.full:
                self.seek(0)
                self.truncate()
                raise OSError(errno.ENOSPC, "no space left on device")

    disk = Disk()
    console = display.LastingConsole(file=disk)
    console.print("one")
    disk.full = False
    console.print("two")
    assert disk.getvalue() == "two\n"
