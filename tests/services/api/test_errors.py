import json

import pytest

from common.errors import Reject, RejectReason
from services.api import errors


@pytest.mark.parametrize("reason", list(RejectReason))
def test_every_reason_has_a_status_and_a_code(reason: RejectReason) -> None:
    status, problem = errors.of_reject(Reject(reason, "why", "field"))
    assert 400 <= status < 600 and problem.code == errors.CODES[reason] and problem.param == "field"


@pytest.mark.parametrize(
    ("reason", "param", "status", "kind", "code"),
    [
        (RejectReason.INVALID, "n", 400, "invalid_request_error", "invalid_value"),
        (RejectReason.TOO_LONG, "prompt", 400, "invalid_request_error", "context_length_exceeded"),
        (RejectReason.NOT_FOUND, "model", 404, "invalid_request_error", "model_not_found"),
        (RejectReason.OVERLOADED, None, 429, "rate_limit_error", "overloaded"),
        (RejectReason.UNAVAILABLE, None, 503, "service_unavailable_error", "service_unavailable"),
        (RejectReason.INTERNAL, None, 500, "server_error", "internal_error"),
    ],
)
def test_refusals_in_openais_words(reason: RejectReason, param: str, status: int, kind: str, code: str) -> None:
    assert errors.of_reject(Reject(reason, "why", param)) == (status, errors.Problem("why", kind, param, code))


def test_the_body_is_openais() -> None:
    body = json.loads(errors.encode(errors.problem(404, "nothing here")))
    assert body == {
        "error": {"message": "nothing here", "type": "invalid_request_error", "param": None, "code": "not_found"}
    }
    assert errors.as_json(errors.problem(404, "nothing here")) == body["error"]


def test_paths_of_anthropics_api_have_its_body() -> None:
    named = errors.problem(400, "must be less", "messages[0].content")
    body = json.loads(errors.body_at("/v1/messages/count_tokens", 400, named, "r1"))
    text = "messages[0].content: must be less"
    kind = "invalid_request_error"
    assert body == {"type": "error", "error": {"type": kind, "message": text}, "request_id": "r1"}
    kinds = {status: json.loads(errors.body_at("/v1/messages", status, named))["error"]["type"] for status in STATUSES}
    assert kinds == STATUSES
    assert "code" in json.loads(errors.body_at("/v1/messages2", 400, named))["error"]


STATUSES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def test_only_passing_states_ask_to_come_back() -> None:
    assert errors.headers_of(429, 3) == errors.headers_of(503, 3) == {"retry-after": "3"}
    assert errors.headers_of(504, 3) == {"x-should-retry": "false"}
    assert errors.headers_of(400, 3) == errors.headers_of(500, 3) == {}


def test_an_unknown_reason_is_our_fault() -> None:
    assert errors.reason_of("too_long") is RejectReason.TOO_LONG
    assert errors.reason_of("gremlins") is RejectReason.INTERNAL
