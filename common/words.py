"""Which tokens an output may have, besides what its grammar says; part of common/protocol.py."""

import msgspec


class Words(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of a Sampling."""

    allowed: tuple[int, ...] = ()  # only these tokens may come; empty: all
    banned: tuple[tuple[int, ...], ...] = ()  # no output has these tokens in this order
