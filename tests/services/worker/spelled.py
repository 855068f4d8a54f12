"""A vocabulary for tiny models: a token for each printable character and some longer ones; 2 ends."""

from llguidance import LLTokenizer, TokenizerWrapper

from common.protocol import Grammar
from services.worker.grammars import Grammars

EOS = 2
PIECES = ["", "", "", *(chr(code) for code in range(32, 127)), "ab", "abc", "true", "false", '":', "00", "é"]


class Spelled(TokenizerWrapper):
    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = EOS

    def __init__(self, size: int) -> None:
        self.tokens = [piece.encode() for piece in PIECES] + [b""] * (size - len(PIECES))
        self.special_token_ids = [EOS]

    def __call__(self, text: str) -> list[int]:
        return [PIECES.index(character) for character in text if character in PIECES]


def words(size: int) -> LLTokenizer:
    return LLTokenizer(Spelled(size), n_vocab=size, eos_token=[EOS])


def grammars(size: int) -> Grammars:
    """Waits for matchers as long as they need, as a rank does that follows."""
    return Grammars(size, (EOS,), lambda: words(size), leads=False)


def text_of(tokens: list[int]) -> str:
    """Up to the end, if there is one."""
    return "".join(PIECES[token] for token in tokens[: tokens.index(EOS) if EOS in tokens else None])


def ids(text: str) -> list[int]:
    return [PIECES.index(character) for character in text]


def regex(text: str) -> Grammar:
    return Grammar("regex", text, "guided_regex")
