import json

from services.api.batches.results import answered, unanswered


def test_lines_of_both_files() -> None:
    good = json.loads(answered("mine", 200, "r-1", b'{"a":[1]}'))
    identity = good.pop("id")
    assert identity.startswith("batch_req_") and good == {
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": "r-1", "body": {"a": [1]}},
        "error": None,
    }
    bad = json.loads(unanswered("mine", "batch_expired", "too late"))
    assert bad.pop("id") != identity
    assert bad == {"custom_id": "mine", "response": None, "error": {"code": "batch_expired", "message": "too late"}}
