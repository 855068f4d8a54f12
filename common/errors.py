"""Why a request is not served, in words that every service shares.

A `Reject` is the user's doing or the system's momentary state; a broken invariant is an assertion and ends the process.
"""

from enum import StrEnum


class RejectReason(StrEnum):
    """The kinds of refusal; `services/api/errors.py` maps each to one HTTP status."""

    INVALID = "invalid"  # the request breaks a rule: 400
    TOO_LONG = "too_long"  # prompt or prompt + output exceed a limit: 400
    NOT_FOUND = "not_found"  # unknown model or route: 404
    OVERLOADED = "overloaded"  # a bounded queue is full: 429
    ABORTED = "aborted"  # somebody has asked for its end: 499
    DEADLINE = "deadline"  # the request's own time was over before its answer: 504
    UNAVAILABLE = "unavailable"  # a needed service is not ready: 503
    OUT_OF_MEMORY = "out_of_memory"  # the device had no memory for its step: 503
    INTERNAL = "internal"  # our fault: 500

    @classmethod
    def _missing_(cls, value: object) -> "RejectReason":
        """What another service's version calls a reason that this one does not know counts as our fault."""
        return cls.INTERNAL


MAX_MESSAGE = 2000  # characters; a template or a library may say anything, and quote a whole prompt


class Reject(Exception):
    """A request that will not be served. `param` names the field at fault, if one is.

    The message can always be sent: it is not long, and what UTF-8 cannot express is written as an escape.
    """

    def __init__(self, reason: RejectReason, message: str, param: str | None = None) -> None:
        message = message[:MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param


EXIT_CONFIG = 78  # sysexits.h EX_CONFIG, of a process that met a ConfigError: starting again will not help


class ConfigError(Exception):
    """The configuration cannot be used; the text is for the person who wrote it."""
