"""How the id of a sequence says where its answers go. Pure."""


def make_seq_id(api: int, tokenizer: int, salt: int, counter: int) -> int:
    """api instance (8 bits) | tokenizer instance (8) | low 16 bits of the API's incarnation | counter (32).

    A request with n choices owns n consecutive counters: choice i is `seq_id + i`.
    """
    return (api & 0xFF) << 56 | (tokenizer & 0xFF) << 48 | (salt & 0xFFFF) << 32 | (counter & 0xFFFFFFFF)


def api_of(seq_id: int) -> int:
    return seq_id >> 56


def tokenizer_of(seq_id: int) -> int:
    return seq_id >> 48 & 0xFF
