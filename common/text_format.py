"""Values that API and tokenizer tell each other about one request, besides its text; part of common/protocol.py."""

import msgspec

from common.constraints import ToolUse

REASONING, TOOLS = 1, 2  # bits of Submit.parts
ANSWER, AS_IT_IS, GOES_ON = 0, 1, 2  # Options.prompt_end


class Repetition(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Ends an output whose last tokens are `min_count` times the same pattern of `smallest` to `largest` tokens."""

    largest: int
    smallest: int
    min_count: int


class Beams(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The choices are the best outputs that a beam search of `width` beams finds, the very best first."""

    width: int
    length_penalty: float = 1.0
    early: int = (
        0  # when it ends: 0 nothing better is likely, 1 as soon as `width` have ended, 2 nothing better can come
    )


class Options(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of a Submit: what few requests ask for."""

    prompt_end: int = 0  # of a chat: 0 an answer begins, 1 as the messages end, 2 its last message goes on
    keep_tokens: int = 0  # the last ones of the prompt; -1: as many as the context leaves; 0: all
    tell_prompt: bool = False  # its length comes before the first text
    token_ids: bool = False  # of prompt and output come, too
    calls: ToolUse | None = None  # what the answer's grammar says of calls; None: nothing
    silent: bool = False  # the output is for nobody: only the prompt's log-probabilities are
    bad_words: tuple[str, ...] = ()  # the tokenizer makes Words.banned of them
    suffix: str = ""  # what follows the output, by the model's tokens for that
    repetition: Repetition | None = None
    thinking_tokens: int = 0  # of reasoning, after which its end is written for the model; 0: as many as it likes
    plain: bool = False  # a text is encoded without special tokens
    beams: Beams | None = None


class TextFormat(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of the answers to one Submit, before their first text. Names are those of common/dialects/registry.py."""

    seq_id: int  # of the Submit
    tools: str = ""  # dialect of its calls; empty: none are told apart
    reasoning: str = ""
    opened: bool = False  # the prompt has begun the reasoning
    prompt_tokens: int = 0  # if they were asked for
    prompt: bytes = b""  # _i32, likewise
