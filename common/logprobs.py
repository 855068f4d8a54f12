"""Log-probabilities of tokens on their way from the worker to the API; part of common/protocol.py.

They are those of the model's own logits: before temperature, penalties, biases and masks. A record of one token is an
int32 column: its rank from 1 on, 1 + top token ids (its own, then the `top` most probable ones, best first, or those
that the request has named), and as many float32 values. Equal logits are ordered by id. All records of a sequence have
one width.
"""

import msgspec

from common.pooling import Pooling


class Report(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of a Sampling: which tokens come with log-probabilities, and with how many other ones beside each.

    With `pooling` no token comes at all, but a vector of the prompt.
    """

    top: int = -1  # of the output's tokens; -1: none
    prompt: int = -1  # of the prompt's tokens but the first, which follows nothing
    pooling: Pooling | None = None
    named: tuple[int, ...] = ()  # ids that come beside each output token in place of the best ones: `top` of them

    @property
    def asks(self) -> bool:
        """For log-probabilities."""
        return self.top >= 0 or self.prompt >= 0


class StepLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of a StepResult: of the rows that want them. What a failed row has here means nothing."""

    tokens: bytes = b""  # records of the step's tokens in their order, each of its row's width; failed rows have none
    prompts: dict[
        int, tuple[int, bytes]
    ] = {}  # by place in the plan's rows: first token's place in the prompt, records
    vectors: dict[int, bytes] = {}  # float32, likewise: of rows whose prompt is pooled and whole


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of a TokenBatch: consecutive records of one sequence."""

    first: int = 0  # output token that the first one is of
    records: bytes = b""
    first_prompt: int = 0  # likewise of the prompt
    prompt: bytes = b""


class TextLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of a TextBatch: consecutive records of one sequence, and what their token ids are as text."""

    first: int
    records: bytes
    pieces: list[bytes]  # UTF-8, possibly a part of a character, of each id of each record
    offsets: bytes = b""  # _i32: characters of text before each token; of an output only
    lead: bytes = b""  # of a prompt: its first token, which has no record
    lead_token: int = -1  # likewise, its id


def record_bytes(top: int) -> int:
    """Width of a record; 0 where there are none."""
    return 4 * (1 + 2 * (1 + top)) if top >= 0 else 0
