"""Builds a tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") and sentencepiece BPE ("llama").

Pure. A GGUF file names its pre-tokenizer instead of carrying it; SPLITS holds what the original tokenizers do under
each name (facts of those models' tokenizer.json files). What is not known here is a ConfigError, never a near miss.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from common.errors import ConfigError

T = TypeVar("T")
UNKNOWN_TYPE, CONTROL_TYPE, USER_TYPE = 2, 3, 4  # tokenizer.ggml.token_type
SPACE_MARK = "\u2581"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    rf"|\p{{N}}|{SLASH_TAIL}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{SLASH_TAIL}"
)
DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Split(NamedTuple):
    """A named pre-tokenizer: patterns applied one after the other, each match a piece of its own."""

    patterns: tuple[str, ...]
    normalize_nfc: bool = False
    ignore_merges: bool = False  # a word that is a token stays whole
    add_bos: bool = False  # unless the file says otherwise


_DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_GPT2 = Split((GPT2,))
_DIGITS_GPT2 = Split((r"\p{N}", GPT2))
_LLAMA3 = Split((LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = Split((QWEN2,), normalize_nfc=True)
_GPT4O = Split((GPT4O,))
_DEEPSEEK3 = Split((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK3_WORDS))

SPLITS: Mapping[str, Split] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "jina-es": _GPT2,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": Split((QWEN35,), normalize_nfc=True),
    "tekken": Split((TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "deepseek-v3": _DEEPSEEK3,
}


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises ConfigError when it is of an unknown kind or damaged."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ConfigError("the GGUF file holds no tokenizer (tokenizer.ggml.tokens)")
    types = _listed(metadata, "token_type", int) or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens, types)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens, types)
    else:
        raise ConfigError(f'GGUF tokenizers of model "{kind!s:.60}" are not supported, only "gpt2" and "llama"')
    _add_special(tokenizer, tokens, types)
    _frame(tokenizer, metadata, tokens, add_bos)
    return tokenizer


def _listed(metadata: Mapping[str, Any], name: str, kind: type[T]) -> list[T]:
    """An array of the file; empty if there is none. Raises ConfigError if it is something else."""
    found = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(found, list) or not all(isinstance(entry, kind) for entry in found):
        raise ConfigError(f"tokenizer.ggml.{name} is {str(found)[:60]}, not a list of {kind.__name__}")
    return found


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Names as templates know them ("bos_token") to token strings."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}
    found: dict[str, str] = {}
    for key, name in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            found[f"{name}_token"] = tokens[token_id]
    return found


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in SPLITS:
        raise ConfigError(f'the GGUF pre-tokenizer "{name!s:.60}" is not supported; known are {", ".join(SPLITS)}')
    split = SPLITS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in _listed(metadata, "merges", str)]
    # User-defined tokens are written plainly; the model's own table must not hold what its alphabet cannot spell.
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConfigError("the GGUF file lists a token twice")
    tokenizer = Tokenizer(_bpe(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges))
    if split.normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN_TYPE), None)
    merges: Sequence[tuple[str, ...]]
    if "tokenizer.ggml.merges" in metadata:
        merges = [tuple(merge.split(" ", 1)) for merge in _listed(metadata, "merges", str)]
    else:
        merges = merges_by_score(vocab, _listed(metadata, "scores", float), types)
    tokenizer = Tokenizer(_bpe(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", SPACE_MARK)]
    lead: list[Any] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
        lead = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *lead]
    )
    return tokenizer, True


def merges_by_score(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The merges that sentencepiece's scores mean: a pair is joined the sooner, the higher its result scores."""
    if len(scores) != len(vocab):
        raise ConfigError(f"the GGUF file has {len(vocab)} different tokens but {len(scores)} scores")
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in vocab.items():
        if types[token_id] not in (1, USER_TYPE):
            continue
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], left, right, piece[:cut], piece[cut:]))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _bpe(**settings: Any) -> models.BPE:
    # A list of merges that the vocabulary cannot spell is answered with a bare Exception; check it here instead.
    vocab = settings["vocab"]
    for merge in settings["merges"]:
        if len(merge) != 2 or merge[0] not in vocab or merge[1] not in vocab or merge[0] + merge[1] not in vocab:
            raise ConfigError(f"the GGUF file has the merge {' '.join(merge)!r}, which its tokens cannot spell")
    return models.BPE(**settings)


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are matched whole in any text. Control tokens are special: not shown in the output."""
    control = [token for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN_TYPE, CONTROL_TYPE)]
    user = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])


def _frame(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], add_bos: bool) -> None:
    """BOS before and EOS after a plain text, as the file asks."""
    ids = {"bos": metadata.get("tokenizer.ggml.bos_token_id"), "eos": metadata.get("tokenizer.ggml.eos_token_id")}
    wanted = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    found: dict[str, str] = {}
    for name, token_id in ids.items():
        if not wanted[name] or token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ConfigError(f"tokenizer.ggml.{name}_token_id is {token_id!r}, outside the vocabulary")
        found[name] = tokens[token_id]
    set_frame(tokenizer, found.get("bos"), found.get("eos"))


def set_frame(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes the tokenizer put these tokens around a plain text (none of them: nothing)."""
    parts = [bos] * bool(bos) + ["$A"] + [eos] * bool(eos)
    used = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{part}:0" if part == "$A" else part for part in parts if part],
        special_tokens=list(used.items()),
    )
