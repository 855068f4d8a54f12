"""What is kept of responses: each key's own, bounded, and those in the background computed by one replica at a time."""

import json
from pathlib import Path

from services.api.batches.database import Database
from services.api.batches.records import Line, Response
from services.api.batches.responses import ANSWER_BYTES, Responses

MANY = 10**9


def response(name: str, status: str = "completed", previous: str | None = None, created: int = 5) -> Response:
    body = json.dumps({"id": name, "created_at": created, "background": status == "queued", "status": status})
    body = json.dumps(json.loads(body) | {"store": True, "previous_response_id": previous, "output": []})
    return Response(name, "me", created, status, previous, "[]", body, b'{"input":"x"}' if status == "queued" else None)


def kept(tmp_path: Path, own: int = 1) -> Responses:
    return Responses(Database(tmp_path), own)


def add(responses: Responses, *all_of: Response, most: int = MANY, most_bytes: int = MANY) -> None:
    for each in all_of:
        assert responses.add(each, MANY, most, most_bytes)


def test_each_key_sees_its_own(tmp_path: Path) -> None:
    responses = kept(tmp_path)
    add(responses, response("a"))
    found = responses.find("a", "me")
    assert found and found.bytes > ANSWER_BYTES and found.status == "completed"
    assert responses.find("a", "you") is None and not responses.chain("a", "you", 9)
    assert not responses.delete("a", "you") and responses.delete("a", "me") and responses.find("a", "me") is None


def test_a_chain_is_the_whole_conversation_or_says_where_it_ends(tmp_path: Path) -> None:
    responses = kept(tmp_path)
    add(responses, response("a"), response("b", previous="a"), response("c", previous="b"))
    assert [each.id for each in responses.chain("c", "me", 9)] == ["a", "b", "c"]
    assert [each.id for each in responses.chain("c", "me", 2)] == ["b", "c"]
    responses.delete("a", "me")
    assert responses.chain("c", "me", 9)[0].previous == "a"


def test_the_oldest_go_by_number_bytes_and_age(tmp_path: Path) -> None:
    responses = kept(tmp_path)
    for number in range(5):
        add(responses, response(f"r{number}", created=number), most=3)
    assert [bool(responses.find(f"r{number}", "me")) for number in range(5)] == [False, False, True, True, True]
    size = responses.find("r4", "me")
    assert size is not None
    add(responses, response("r5"), most_bytes=2 * size.bytes)
    assert [bool(responses.find(f"r{number}", "me")) for number in range(6)] == [False] * 4 + [True, True]
    add(responses, response("old", "queued", created=0))
    responses.sweep(age_s=1.0)
    assert responses.find("r5", "me") is None and responses.find("old", "me"), "what is computed is kept"


def test_computed_by_one_replica_whoever_dies(tmp_path: Path) -> None:
    first, second = kept(tmp_path, 1), kept(tmp_path, 2)
    add(first, response("a", "queued"), response("b", "queued"))
    (line,) = first.take(1)
    assert (line.custom, line.batch, line.body) == ("a", "", b'{"input":"x"}')
    assert [each.custom for each in second.take(9)] == ["b"] and not second.take(9)
    found = first.find("a", "me")
    assert found and found.status == "in_progress" and json.loads(found.body)["status"] == "in_progress"
    assert second.release([1, 2]) == 0 and second.release([2]) == 1
    assert first.mine(["a", "b"]) == set() and [each.custom for each in second.take(9)] == ["a"]
    result = json.dumps({"id": "other", "status": "completed", "output": [1], "background": False}).encode()
    assert not first.answer(line, True, result), "it has lost it"
    assert second.answer(line, True, result)
    done = second.find("a", "me")
    assert done and done.status == "completed" and done.request is None
    assert json.loads(done.body) == json.loads(response("a", "queued").body) | {"status": "completed", "output": [1]}


def test_an_error_is_a_response_that_failed(tmp_path: Path) -> None:
    responses = kept(tmp_path)
    add(responses, response("a", "queued"))
    (line,) = responses.take(1)
    problem = {"error": {"message": "too long", "type": "invalid_request_error", "code": "x", "param": None}}
    assert responses.answer(line, False, json.dumps(problem).encode())
    found = responses.find("a", "me")
    assert found and found.status == "failed"
    assert json.loads(found.body)["error"] == {"code": "invalid_prompt", "message": "too long"}


def test_cancelled_and_given_back(tmp_path: Path) -> None:
    responses = kept(tmp_path)
    add(responses, response("a", "queued"), response("b", "queued"), response("c"))
    first, second = responses.take(9)
    responses.cancel("a", "you")
    assert responses.mine(["a", "b"]) == {"a", "b"}
    responses.cancel("a", "me")
    responses.cancel("c", "me")
    statuses = [each.status for each in map(responses.find, "abc", ["me"] * 3) if each]
    assert statuses == ["cancelled", "in_progress", "completed"]
    assert responses.mine(["a", "b"]) == {"b"} and not responses.answer(first, True, b"{}")
    responses.give_back(second)
    assert [each.custom for each in responses.take(9)] == ["b"]


def test_so_many_in_the_background(tmp_path: Path) -> None:
    responses = kept(tmp_path)
    assert responses.add(response("a", "queued"), 1, MANY, MANY)
    assert not responses.add(response("b", "queued"), 1, MANY, MANY)
    assert responses.add(response("c"), 1, MANY, MANY)
    assert isinstance(responses.take(9)[0], Line)
