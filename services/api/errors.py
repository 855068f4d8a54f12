"""Refusals as HTTP: one status per reason, and OpenAI's error body for every answer that is not 2xx. Pure.

Paths of Anthropic's API have Anthropic's.
"""

from typing import Any, Literal

import msgspec

from common.errors import Reject, RejectReason

STATUS = {
    RejectReason.INVALID: 400,
    RejectReason.TOO_LONG: 400,
    RejectReason.NOT_FOUND: 404,
    RejectReason.OVERLOADED: 429,
    RejectReason.ABORTED: 499,
    RejectReason.DEADLINE: 504,
    RejectReason.UNAVAILABLE: 503,
    RejectReason.OUT_OF_MEMORY: 503,
    RejectReason.INTERNAL: 500,
}
CODES = {
    RejectReason.INVALID: "invalid_value",
    RejectReason.TOO_LONG: "context_length_exceeded",
    RejectReason.NOT_FOUND: "not_found",
    RejectReason.OVERLOADED: "overloaded",
    RejectReason.ABORTED: "request_aborted",
    RejectReason.DEADLINE: "deadline_exceeded",
    RejectReason.UNAVAILABLE: "service_unavailable",
    RejectReason.OUT_OF_MEMORY: "out_of_memory",
    RejectReason.INTERNAL: "internal_error",
}
HTTP_CODES = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    431: "headers_too_large",
}
TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}


class Problem(msgspec.Struct, frozen=True):
    """OpenAI's error object. `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: Problem


class AnthropicProblem(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    error: AnthropicProblem
    type: Literal["error"] = "error"
    request_id: str | None = None


ANTHROPIC = "/v1/messages"  # and what is below it
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def problem(status: int, message: str, param: str | None = None, code: str | None = None) -> Problem:
    """The error object of an HTTP status."""
    kind = TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return Problem(message, kind, param, code or HTTP_CODES.get(status))


def of_reject(reject: Reject) -> tuple[int, Problem]:
    """HTTP status and error object of a refusal."""
    code = "model_not_found" if reject.reason is RejectReason.NOT_FOUND and reject.param == "model" else None
    status = STATUS[reject.reason]
    return status, problem(status, reject.message, reject.param, code or CODES[reject.reason])


def reason_of(name: str) -> RejectReason:
    """The reason that another service named; one this version does not know counts as our fault."""
    return RejectReason(name)


def encode(error: Problem) -> bytes:
    return msgspec.json.encode(ErrorBody(error))


def of_anthropic(path: str) -> bool:
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def anthropic_error(status: int, error: Problem, identity: str | None = None) -> AnthropicErrorBody:
    """The error body of these paths: it has no place for the field's name but the message."""
    kind = ANTHROPIC_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    unnamed = error.param is not None and error.param not in error.message
    message = f"{error.param}: {error.message}" if unnamed else error.message
    return AnthropicErrorBody(AnthropicProblem(kind, message), request_id=identity)


def body_at(path: str, status: int, error: Problem, identity: str | None = None) -> bytes:
    """The error body that clients of this path know."""
    if of_anthropic(path):
        return msgspec.json.encode(anthropic_error(status, error, identity))
    return encode(error)


def headers_of(status: int, retry_after_s: int) -> dict[str, str]:
    """Overload and absence pass: clients are told when to come back. A deadline that is over stays over."""
    if status == 504:
        return {"x-should-retry": "false"}  # OpenAI's clients would try again
    return {"retry-after": str(retry_after_s)} if status in (429, 503) else {}


def invalid(message: str, param: str | None = None) -> Reject:
    return Reject(RejectReason.INVALID, message, param)


def as_json(error: Problem) -> dict[str, Any]:
    """The error object for embedding in another JSON object."""
    return msgspec.structs.asdict(error)
