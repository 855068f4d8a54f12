"""The value by which a tokenizer tells the API how a model's answers are written; part of common/protocol.py."""

import msgspec


class TextFormat(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of the answers to one chat, before their first text. Names are those of common/dialects/registry.py."""

    seq_id: int  # of the Submit
    tools: str = ""  # dialect of its calls; empty: none are told apart
    reasoning: str = ""
    opened: bool = False  # the prompt has begun the reasoning
