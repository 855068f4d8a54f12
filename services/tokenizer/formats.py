"""How this model's answers are shown, and told to the API: its dialects (common/dialects), and what is reasoning.

One per process, made when the model's tokenizer is loaded; called by the Streams. Owns nothing that changes.
"""

from array import array
from bisect import bisect_left
from itertools import accumulate

from common.answer_grammar import Thinking
from common.dialects.dialect import ReasoningDialect
from common.dialects.registry import Dialects, Reader
from common.errors import Reject, RejectReason
from common.protocol import Submit, TextFormat
from common.text_format import REASONING, TOOLS
from common.vocabulary import Vocabulary

TAIL, HEAD = 16, 8  # tokens at the prompt's end and the output's beginning that show whether there is reasoning


def asked_of(dialects: Dialects, parts: int) -> Dialects:
    """Those that a request's answers are read by; `parts`: of its Submit."""
    tools, reasoning = dialects
    return Dialects(tools if parts & TOOLS else None, reasoning if parts & REASONING else None)


def thinking_after(prompt: "array[int]", reasoning: ReasoningDialect | None, vocabulary: Vocabulary) -> Thinking:
    """Whether the answer to this prompt begins with reasoning."""
    if reasoning is None or not reasoning.begin:
        return Thinking.NO
    tail = vocabulary.decode(prompt[-TAIL:]).rstrip()
    if tail.endswith(reasoning.begin):
        return Thinking.BEGUN
    return Thinking.NO if tail.endswith(reasoning.end) else Thinking.MAY


class Formats:
    def __init__(self, dialects: Dialects, vocabulary: Vocabulary) -> None:
        self._tools, self._reasoning = dialects
        self.vocabulary = vocabulary
        self._views = [vocabulary.showing(self._asked(parts).markers) for parts in range(4)]

    def _asked(self, parts: int) -> Dialects:
        return asked_of(Dialects(self._tools, self._reasoning), parts)

    def words(self, submit: Submit) -> Vocabulary:
        """The tables for an answer: without the markers that the API needs, it could not tell its parts apart."""
        return self._views[submit.parts & (REASONING | TOOLS)]

    def told(self, submit: Submit, prompt: "array[int]") -> TextFormat | None:
        """What the API must know to read the answers; None if they are plain text.

        Raises Reject if they are to have tool calls and nothing is known of how this model makes them.
        """
        tools, reasoning = self._asked(submit.parts)
        if submit.parts & TOOLS and tools is None:
            text = "this model has no way of calling tools that is known here; model.tool_parser can name one"
            raise Reject(RejectReason.INVALID, text, "tools")
        options = submit.options  # nearly always none
        if tools is None and reasoning is None and not options.tell_prompt and not options.token_ids:
            return None
        return TextFormat(
            submit.seq_id,
            tools.name if tools else "",
            reasoning.name if reasoning else "",
            thinking_after(prompt, reasoning, self.vocabulary) is Thinking.BEGUN,
            len(prompt),
            prompt.tobytes() if options.token_ids else b"",
        )

    def reasoning_tokens(self, submit: Submit, told: TextFormat | None, output: "array[int]") -> int:
        """Tokens of an output that are reasoning, markers included."""
        if told is None or not told.reasoning or self._reasoning is None or not output:
            return 0
        words = self.words(submit)
        hidden = words.special if submit.skip_special_tokens else frozenset()
        begin = self._reasoning.begin
        if begin and not told.opened and not words.decode(output[:HEAD]).lstrip().startswith(begin):
            return 0
        pieces = [b"" if token in hidden else words.pieces[token] for token in output]
        text = b"".join(pieces).decode("utf-8", "replace")
        reader = Reader(Dialects(None, self._reasoning), None, told.opened)
        reader.feed(text)
        starts = [0, *accumulate(map(len, pieces))][:-1]
        places = [len(text[:place].encode()) for span in reader.reasoning_spans for place in span]
        counts = [bisect_left(starts, place) for place in places]
        return sum(counts[1::2]) - sum(counts[::2])
