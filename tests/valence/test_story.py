import json
from pathlib import Path

import pytest

from common.protocol import FinishReason, Peer
from common.recorder import Kind
from tests.valence.recorded import noted, seq
from tests.valence.running import serving
from valence.crashes import recordings
from valence.errors import CommandError
from valence.story import Story, ask, document, newest_requests, number_of, phrase, tell


def words(story: Story) -> list[str]:
    return [f"{entry.process} {entry.what}" for entry in story.entries if entry.tone != "around"]


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """A request whose tokenizer and worker were killed."""
    api, scheduler = noted(tmp_path, "api", 1), noted(tmp_path, "scheduler")
    first, second = noted(tmp_path, "tokenizer", 0, dead=True), noted(tmp_path, "tokenizer", 1)
    worker = noted(tmp_path, "worker", 0, dead=True)
    api.requests.add(Kind.RECEIVED, seq(9), 1, 50, text=b"other")
    first.requests.add(Kind.SUBMITTED, seq(1), 1)
    api.requests.add(Kind.RECEIVED, seq(1), 1, 900_000, text=b"mine")
    first.requests.add(Kind.ENCODED, seq(1), 12, 1)
    scheduler.sequence(seq(1), "row in step 4, 0 of 12 tokens have KV")
    worker.requests.add(Kind.ROW, seq(1), 4, 0, 2)
    scheduler.peer(Kind.LEFT, Peer("worker", 0, 5, ""), "went silent")
    scheduler.sequence(seq(1), "worker lost: secret reason")
    scheduler.sequence(seq(9), "LENGTH", FinishReason.LENGTH)
    api.requests.add(Kind.WAITING, seq(1))
    api.requests.add(Kind.MOVED, seq(2, 1), seq(1))
    second.requests.add(Kind.SUBMITTED, seq(2, 1), 1, seq(1))
    scheduler.sequence(seq(2, 1), "LENGTH", FinishReason.LENGTH)
    api.requests.add(Kind.ANSWERED, seq(2, 1), 64, 16, FinishReason.LENGTH)
    api.life.add(Kind.STALLED, a=5000)  # after its end
    return tmp_path


STORY = [
    f"api-1 received mine as {seq(1):#018x}",
    "tokenizer-0 begins to encode",
    "tokenizer-0 encoded: 12 tokens",
    "scheduler-0 row in step 4, 0 of 12 tokens have KV",
    "worker-0 row in slot 2 from step 4, 0 tokens have KV",
    "scheduler-0 worker lost",
    "api-1 the tokenizer has gone; waits for another",
    f"api-1 moved to tokenizer-1 as {seq(2, 1):#018x}",
    f"tokenizer-1 takes over {seq(1):#018x}",
    "scheduler-0 ended: LENGTH",
    "api-1 answered: length, 64 tokens, 16 of the prompt cached",
]


@pytest.mark.parametrize("name", ["mine", "chatcmpl-mine", "cmpl-mine", str(seq(1)), f"{seq(2, 1):#x}"])
def test_a_moved_request_has_one_story_under_all_its_names(moved: Path, name: str) -> None:
    story = tell(recordings(moved), name)
    assert [line for line in words(story) if "last sign" not in line] == STORY
    assert story.request == "mine" and story.ids == sorted((seq(1), seq(2, 1)))
    assert {entry.choice for entry in story.entries} == {-1}
    around = [f"{entry.process} {entry.what}" for entry in story.entries if entry.tone == "around"]
    assert "scheduler-0 worker-0 went silent" in around and "api-1 stood still for 5.0 s" not in around
    assert any("worker-0 the last sign of pid" in line for line in words(story))


def test_a_request_that_still_runs_ends_with_what_is_known(tmp_path: Path) -> None:
    api = noted(tmp_path, "api", 1)
    api.requests.add(Kind.RECEIVED, seq(1), 1, 0, text=b"mine")
    api.life.add(Kind.STALLED, a=5000)
    assert [entry.what for entry in tell(recordings(tmp_path), "mine").entries][-1] == "stood still for 5.0 s"


def test_choices_and_prompts_are_told_apart(tmp_path: Path) -> None:
    api, scheduler = noted(tmp_path, "api", 1), noted(tmp_path, "scheduler")
    api.requests.add(Kind.RECEIVED, seq(1), 2, 0, text=b"mine")
    api.requests.add(Kind.RECEIVED, seq(8, 1), 1, 0, text=b"mine")
    api.requests.add(Kind.MOVED, seq(20), seq(2))
    for seq_id in (seq(1), seq(20), seq(8, 1)):
        scheduler.sequence(seq_id, "filled in step 1")
    story = tell(recordings(tmp_path), "mine")
    assert [entry.choice for entry in story.entries if entry.what == "filled in step 1"] == [0, 1, 2]


def test_of_requests_with_the_same_id_the_newest_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = noted(tmp_path, "api", 1)
    for counter, age_us in ((1, 9_000_000), (2, 5_000_000), (3, 0)):
        api.requests.add(Kind.RECEIVED, seq(counter), 1, age_us, text=b"mine")
    story = tell(recordings(tmp_path), "mine")
    assert story.ids == [seq(3)] and story.others == 2


def test_a_refused_request_is_told_by_the_api(tmp_path: Path) -> None:
    api = noted(tmp_path, "api", 1)
    api.refusals.add(Kind.REFUSED, a=429, text=b"mine")
    api.refusals.add(Kind.REFUSED, a=400, text=b"other")
    assert words(tell(recordings(tmp_path), "mine")) == ["api-1 refused: HTTP 429"]


def test_an_id_that_was_cut_is_found_whole(tmp_path: Path) -> None:
    identity = "x" * 128
    noted(tmp_path, "api", 1).requests.add(Kind.RECEIVED, seq(1), 1, 0, text=identity.encode())
    assert tell(recordings(tmp_path), identity).ids == [seq(1)]


@pytest.mark.parametrize("name", ["nobody", "0x99", "123", "0x" + "f" * 17, ""])
def test_what_is_unknown_is_said_to_be(tmp_path: Path, name: str) -> None:
    noted(tmp_path, "api", 1)
    with pytest.raises(CommandError, match="nothing is recorded"):
        tell(recordings(tmp_path), name)


def test_numbers_are_sequences_where_they_can_be() -> None:
    assert number_of("0x10") == 16 and number_of("16") == 16 and number_of(str(2**64 - 1)) == 2**64 - 1
    assert number_of(str(2**64)) is None and number_of("0x") is None and number_of("1e3") is None


def test_the_newest_requests_and_how_they_ended(moved: Path) -> None:
    listed = newest_requests(recordings(moved))
    assert [(entry.request, entry.end) for entry in listed] == [
        ("mine", "length, 64 tokens, 16 of the prompt cached"),  # it came a second before
        ("other", "open"),
    ]


def test_every_kind_has_words() -> None:
    from common.recorder import Event

    for kind in Kind:
        what, _ = phrase(Event(1, 1.0, 1.0, kind, 5, 6, 7, 99, "text"))
        assert what


def test_programs_get_the_same(moved: Path) -> None:
    told, _ = ask(moved, "mine", crashed=False)
    found = json.loads(json.dumps(document(told)))
    assert found["request"] == "mine" and found["ids"] == [f"{seq(1):#018x}", f"{seq(2, 1):#018x}"]
    assert found["entries"][0]["process"] == "api-1" and found["entries"][0]["at_s"] > 1e9
    assert json.loads(json.dumps(document(ask(moved, "", crashed=False)[0])))[0]["request"] == "mine"
    crash = json.loads(json.dumps(document(ask(moved, "", crashed=True)[0])))
    assert crash["process"] in ("worker-0", "tokenizer-0") and crash["how"].startswith("it noted no end")
    assert {"at_s", "kind", "seq", "what"} == set(crash["events"][0]) and crash["events"][0]["kind"] == "started"


def test_the_commands_of_a_running_server() -> None:
    with serving() as server:
        server.read_until("Ready after")
        answer = server.command("story")
        assert answer.returncode == 0, answer.stderr
        nothing = server.command("story", "0x0100000000000001")  # also asks the scheduler
        assert nothing.returncode == 1 and "nothing is recorded" in nothing.stderr
        none = server.command("story", "--crash")
        assert none.returncode == 1 and "no crash is recorded" in none.stderr
