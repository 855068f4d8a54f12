"""Turns a request's text, messages or token ids into prompt ids, and checks them. Runs in a pool of threads.

An Encoder is never changed after it was made, so any number of threads may use it. The tokenizers library gives the
interpreter lock back while it encodes a batch (not for a single text), so the event loop runs on meanwhile.
"""

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from tokenizers import Encoding

from common.answer_grammar import Thinking, answer_grammar
from common.columns import unpack_i32
from common.constraints import ToolUse
from common.dialects.forms import Tool
from common.errors import Reject, RejectReason
from common.protocol import Grammar, PromptKind, Sampling, Submit, Tokenize
from common.text_format import ANSWER, AS_IT_IS, GOES_ON
from services.tokenizer.checker import Checker
from services.tokenizer.formats import asked_of, thinking_after
from services.tokenizer.infill import filled_in
from services.tokenizer.source import Loaded
from services.tokenizer.thinking import Thinking as Bound

MUCH = 1 << 17  # characters of a grammar, some tenths of a second: arguments that need not match are then any object
ANY_OBJECT = {"type": "object"}
END_MARK = "\U0010fffd\U0010fffc"  # private characters: no template knows them


class Encoded(NamedTuple):
    tokens: "array[int]"  # int32
    strings: list[str]


class Prompt(NamedTuple):
    tokens: "array[int]"  # int32
    grammar: Grammar | None = None  # that the whole output must match
    banned: tuple[tuple[int, ...], ...] = ()  # as in Words
    tail: int = 0  # special tokens that the tokenizer has put behind a text
    thinking: Bound | None = None


class Encoder:
    def __init__(self, loaded: Loaded, max_template_chars: int, checker: Checker | None = None) -> None:
        self._checker = checker
        self._tokenizer = loaded.tokenizer
        self._vocabulary = loaded.vocabulary
        self._template = loaded.template
        self._no_template = loaded.no_template
        self._about = loaded.about
        self._dialects = loaded.dialects
        self._max_template_chars = max_template_chars

    def prompt(self, submit: Submit, vocab_size: int) -> Prompt:
        """What a request says, made ready and checked; at least one token. Raises Reject."""
        tail = 0
        if submit.kind == PromptKind.TOKENS:
            tokens = _token_ids(submit.tokens, vocab_size, "prompt")
        elif submit.kind == PromptKind.CHAT:
            text = self._rendered(submit.messages, submit.template_kwargs, submit.options.prompt_end)
            tokens = array("i", self._encode(text, False, "messages").ids)
        else:
            encoding = self._encode(submit.text, not submit.options.plain, "prompt")
            tokens, tail = array("i", encoding.ids), tail_of(encoding)
        if not tokens:
            raise Reject(RejectReason.INVALID, "the prompt is empty", param_of(submit.kind))
        if submit.options.suffix:
            tokens = self._filled_in(submit)
        banned = tuple(dict.fromkeys(self._banned(submit)))
        return Prompt(tokens, self._grammar(submit, tokens), banned, tail, self._thinking(submit, tokens))

    def _thinking(self, submit: Submit, tokens: "array[int]") -> Bound | None:
        """How much reasoning there may be. Raises Reject where nobody can say what is."""
        most, dialect = submit.options.thinking_tokens, self._dialects.reasoning
        if not most:
            return None
        if dialect is None:
            text = (
                "thinking_token_budget: no way of reasoning is known of this model; model.reasoning_parser can name one"
            )
            raise Reject(RejectReason.INVALID, text, "thinking_token_budget")
        opened = thinking_after(tokens, dialect, self._vocabulary) is Thinking.BEGUN
        begin, end = (
            tuple(self._encode(text, False, "thinking_token_budget").ids)
            for text in dialect.written or (dialect.begin, dialect.end)
        )
        return Bound(most + (0 if opened else len(begin)), end, dialect, opened)

    def _filled_in(self, submit: Submit) -> "array[int]":
        whole, plain = (self._encode(submit.text, special, "prompt").ids for special in (True, False))
        begins = len(whole) - len(plain)
        lead = whole[:begins] if begins > 0 and whole[begins:] == plain else []
        suffix = self._encode(submit.options.suffix, False, "suffix").ids
        return array("i", filled_in(plain, suffix, lead, self._tokenizer.token_to_id))

    def _banned(self, submit: Submit) -> Iterator[tuple[int, ...]]:
        """A bad word at the beginning of a text and behind other words, where it may be another token."""
        for word in submit.options.bad_words:
            for text in (word, f" {word.lstrip()}"):
                if ids := self._encode(text, False, "bad_words").ids:
                    yield tuple(ids)

    def _grammar(self, submit: Submit, tokens: "array[int]") -> Grammar | None:
        """What the whole output must match. Raises Reject."""
        asked, use = submit.sampling.grammar, submit.options.calls
        if asked is None and use is None:
            return None
        dialects = asked_of(self._dialects, submit.parts)
        if use is not None and dialects.tools is None:
            return asked  # the request will be refused (Formats.told)
        thinking = thinking_after(tokens, dialects.reasoning, self._vocabulary)
        if thinking is Thinking.MAY and submit.options.prompt_end == GOES_ON:
            thinking = Thinking.NO
        tools = tools_of(submit, use)
        try:
            grammar = answer_grammar(asked, use, tools, dialects, thinking)
            if tools and grammar is not None and len(grammar.text) > MUCH:
                tools = [tool if tool.strict else tool._replace(schema=ANY_OBJECT) for tool in tools]
                grammar = answer_grammar(asked, use, tools, dialects, thinking)
        except (ValueError, RecursionError) as error:
            raise Reject(RejectReason.INVALID, f"tools: {error}", "tools") from error
        if grammar is not None and submit.sampling.words.allowed:
            text = "allowed_token_ids excludes calls that a grammar enforces"
            raise Reject(RejectReason.INVALID, text, "allowed_token_ids")
        if grammar is not None and self._checker is not None:
            self._checker.check(grammar)
        return grammar

    def tokenize(self, call: Tokenize, max_model_len: int = 0) -> Encoded:
        """Ids and token strings for /tokenize, and the prompts of requests that are not run. Raises Reject."""
        if call.submit is not None:
            prompt = self.prompt(call.submit, self._vocabulary.size)
            return Encoded(shortened(prompt.tokens, call.submit, max_model_len, prompt.tail), [])
        if call.kind == PromptKind.CHAT:
            end = GOES_ON if call.goes_on else ANSWER if call.add_generation_prompt else AS_IT_IS
            text = self._rendered(call.messages, call.template_kwargs, end)
            encoding = self._encode(text, call.add_special_tokens, "messages")
        elif call.kind == PromptKind.TEXT:
            encoding = self._encode(call.text, call.add_special_tokens, "prompt")
        else:
            raise Reject(RejectReason.INVALID, "these are tokens already", "prompt")
        return Encoded(array("i", encoding.ids), [self._tokenizer.id_to_token(token) or "" for token in encoding.ids])

    def detokenize(self, tokens: bytes) -> str:
        """The text for /detokenize. Raises Reject for ids outside the vocabulary."""
        return self._vocabulary.decode(_token_ids(tokens, self._vocabulary.size, "tokens"))

    def describe(self) -> str:
        """For /tokenizer_info: JSON."""
        return msgspec.json.encode(dict(self._about)).decode()

    def _rendered(self, messages: bytes, template_kwargs: bytes, end: int) -> str:
        """`end`: as Options.prompt_end."""
        if self._template is None:
            raise Reject(RejectReason.INVALID, self._no_template, "messages")
        messages = marked(messages) if end == GOES_ON else messages
        text = self._template.render(messages, template_kwargs, end == ANSWER, self._max_template_chars)
        return up_to_mark(text) if end == GOES_ON else text

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"the text has a lone surrogate at character {error.start}: it is not valid Unicode"
            raise Reject(RejectReason.INVALID, message, param) from error
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding


def tools_of(submit: Submit, use: ToolUse | None) -> list[Tool]:
    """Those that may be called, as the template got them."""
    if use is None:
        return []
    functions = [each["function"] for each in msgspec.json.decode(submit.template_kwargs)["tools"]]
    return [
        Tool(function["name"], function.get("parameters") or {}, function["name"] in use.strict)
        for function in functions
        if function["name"] in use.names
    ]


def marked(messages: bytes) -> bytes:
    """The messages with END_MARK at the end of the last one. Raises Reject if there is none."""
    plain = msgspec.json.decode(messages, type=list[dict[str, Any]])
    if not plain:
        raise Reject(RejectReason.INVALID, "there is no message that could go on", "messages")
    plain[-1]["content"] = f"{plain[-1].get('content') or ''}{END_MARK}"
    return msgspec.json.encode(plain)


def up_to_mark(text: str) -> str:
    """A rendered chat without what the template puts behind its last message. Raises Reject."""
    before, mark, _ = text.rpartition(END_MARK)
    if not mark:
        text = "the model's chat template does not show the last message, so it cannot go on"
        raise Reject(RejectReason.INVALID, text, "continue_final_message")
    return before


def tail_of(encoding: Encoding) -> int:
    return next((place for place, special in enumerate(reversed(encoding.special_tokens_mask)) if not special), 0)


def shortened(tokens: "array[int]", submit: Submit, max_model_len: int, tail: int = 0) -> "array[int]":
    """The prompt's last tokens, if the request says how many; where it is pooled its first ones and the tail."""
    keep = submit.options.keep_tokens
    pooled = submit.sampling.report.pooling is not None
    if keep < 0:
        keep = max_model_len - (0 if pooled else max(submit.sampling.max_tokens, 1))
    if not 0 < keep < len(tokens):
        return tokens
    tail = min(tail, keep)
    return tokens[: keep - tail] + tokens[len(tokens) - tail :] if pooled else tokens[-keep:]


def param_of(kind: PromptKind) -> str:
    """The field of the request that its prompt came from."""
    return "messages" if kind == PromptKind.CHAT else "prompt"


def fit(prompt_tokens: int, sampling: Sampling, max_model_len: int, param: str) -> int:
    """The request's max_tokens: as asked, or, for 0, what the model's length leaves; none of what is pooled.

    Raises Reject (TOO_LONG) that names the prompt's field if the prompt alone is too long, else max_tokens.
    """
    # Clients know this error by its text: LiteLLM by the first sentence, LangChain by the code in brackets.
    limit = f"This model's maximum context length is {max_model_len} tokens."
    shorter = f"Please reduce the length of the {param}"
    pooled = sampling.report.pooling is not None
    if pooled and prompt_tokens <= max_model_len:
        return 0
    if not sampling.max_tokens:
        if prompt_tokens >= max_model_len:
            text = f"{limit} However, your {param} resulted in {prompt_tokens} tokens."
            text += f" {shorter} (context_length_exceeded)."
            raise Reject(RejectReason.TOO_LONG, text, param)
        return max_model_len - prompt_tokens
    total = prompt_tokens + sampling.max_tokens
    if total > max_model_len:
        text = (
            f"{limit} However, you requested {total} tokens ({prompt_tokens} in the {param}, "
            f"{sampling.max_tokens} for the completion). {shorter} or completion (context_length_exceeded)."
        )
        raise Reject(RejectReason.TOO_LONG, text, param if prompt_tokens >= max_model_len else "max_tokens")
    return sampling.max_tokens


def _token_ids(column: bytes, vocab_size: int, param: str) -> "array[int]":
    try:
        tokens = array("i", unpack_i32(column))
    except TypeError as error:
        raise Reject(RejectReason.INVALID, "the token ids are not 32-bit numbers", param) from error
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        text = f"token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})"
        raise Reject(RejectReason.INVALID, text, param)
    return tokens
