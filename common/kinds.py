"""The enumerations of the protocol (common/protocol.py), which everybody imports from there."""

from enum import IntEnum


class FinishReason(IntEnum):
    """Why a sequence ended. The API turns these into OpenAI's words."""

    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    LENGTH = 4
    ABORT = 5
    ERROR = 6
    REPETITION = 7  # a pattern of tokens came again and again, which the request does not want


class PromptKind(IntEnum):
    TEXT = 0
    TOKENS = 1
    CHAT = 2
