"""What a request's grammar means: its form for llguidance, and whether it can be used. Pure.

The tokenizer checks a grammar before its request is admitted; the worker makes its matchers from the same text with the
same limits. Limits count work, not time, so that every process and every rank comes to the same end.
"""

import json
from functools import cache, lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from common.errors import Reject, RejectReason
from common.protocol import Grammar
from common.schema_draft import DRAFT, check_draft
from common.structural_tag import WHITESPACE, to_lark

MAX_BYTES = 1 << 18  # of a grammar's text; ten thousand values of an enum are half of it
KEPT_CHECKS = 64
MESSAGE_CHARS = 500
NOTHING = "nothing can come next that matches it"
ENDS = ("NoExtension", "NoExtensionBias")


def limits(patient: bool) -> LLParserLimits:
    """What one grammar may cost: to be made, per token, and in memory; a step of 50,000 takes about 4 ms.

    patient: more, for who follows one that keeps to the limits.
    """
    times = 4 if patient else 1
    return LLParserLimits(
        initial_lexer_fuel=1_000_000 * times,
        step_lexer_fuel=50_000 * times,
        step_max_items=20_000 * times,
        max_lexer_states=20_000 * times,
        max_grammar_size=200_000 * times,
        verbose_errors=False,
    )


def source_of(grammar: Grammar) -> str:
    """The grammar as llguidance takes it. Raises ValueError."""
    if grammar.kind == "json_schema":
        if grammar.text == "false":
            raise ValueError("the schema false is matched by nothing")
        schema = "{}" if grammar.text == "true" else grammar.text
        if DRAFT in schema:
            check_draft(json.loads(schema))
        return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE}))
    if grammar.kind == "structural_tag":
        return str(LLMatcher.grammar_from_lark(to_lark(grammar.text)))
    if grammar.kind == "choice":
        words = json.loads(grammar.text)
        if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
            raise ValueError("choices are a list of texts, none of them empty")
        alternatives = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
        return str(LLMatcher.grammar_from_lark(f"start: WORDS\nWORDS: {alternatives}"))
    return str(grammar_from(grammar.kind, grammar.text))


def make_matcher(grammar: Grammar, words: LLTokenizer, patient: bool = False) -> LLMatcher:
    """At its beginning; `fault_of` tells what is wrong with it, if anything is. Gives the interpreter lock back."""
    return LLMatcher(words, source_of(grammar), log_level=0, limits=limits(patient))


def fault_of(matcher: LLMatcher) -> str:
    """Why a matcher cannot go on; empty if it can, or is at a right end."""
    if matcher.is_error():
        text = matcher.get_error().partition("<state>")[0].partition("<non-verbose/>")[0].strip()
        if text in ENDS:
            return NOTHING
        return "it is not understood" if not text or text.startswith("panic") else text[:MESSAGE_CHARS]
    if matcher.is_stopped() and not matcher.is_accepting():
        return NOTHING
    return ""


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary of single bytes: small, and what it cannot spell, nobody can."""
    return LLTokenizer("byte")


@lru_cache(KEPT_CHECKS)
def _problem(grammar: Grammar) -> str:
    try:
        if len(grammar.text.encode()) > MAX_BYTES:
            return f"it has more than {MAX_BYTES} bytes"
        matcher = make_matcher(grammar, _bytes())
    except (ValueError, RecursionError) as error:
        return str(error)[:MESSAGE_CHARS]
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first step: what matches nothing at all ends here
    return fault_of(matcher)


def check(grammar: Grammar) -> None:
    """May take some tenths of a second. Raises Reject (INVALID) naming the request's field."""
    if problem := _problem(grammar):
        raise Reject(RejectReason.INVALID, f"{grammar.param}: {problem}", grammar.param or None)
