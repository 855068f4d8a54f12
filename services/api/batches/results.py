"""Lines of a batch's output and of its failures, in OpenAI's form. Pure but for the names."""

import secrets

import msgspec


class Answered(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class Unanswered(msgspec.Struct, frozen=True):
    code: str
    message: str


class Result(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: Answered | None
    error: Unanswered | None


def new_name() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def answered(custom: str, status: int, request_id: str, body: bytes) -> bytes:
    """`body`: JSON."""
    return msgspec.json.encode(Result(new_name(), custom, Answered(status, request_id, msgspec.Raw(body)), None))


def unanswered(custom: str, code: str, message: str) -> bytes:
    """The line of a request that did not begin."""
    return msgspec.json.encode(Result(new_name(), custom, None, Unanswered(code, message)))
