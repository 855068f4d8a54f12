"""A stream says what a whole reply says, field by field: random requests and outputs through tokenizer and API.

Both get the same tokens, cut into batches otherwise; all is pure but for the loop that an EventStream runs on.
"""

import asyncio
import json
from array import array
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from common.columns import pack_i32, pack_u64
from common.dialects.registry import REASONING, TOOLS, Dialects
from common.logprobs import Report, TokenLogprobs
from common.protocol import Finished, FinishReason, ModelFacts, Peer, TokenBatch
from common.vocabulary import Vocabulary
from services.api.endpoints import chat_completions, completions
from services.api.figures import Figures
from services.api.hub import Hub, Request
from services.api.routes import Routes
from services.api.schema import chat, completion
from services.api.schema.generation import GenerationRequest, continuous_usage, wants_usage
from services.api.sse import Chunks, EventStream
from services.tokenizer.encode import Prompt
from services.tokenizer.formats import Formats
from services.tokenizer.lanes import Lanes
from services.tokenizer.outbox import Outbox
from services.tokenizer.streams import Streams
from tests.common.dialects.reading import EXAMPLES, TIME, WEATHER
from tests.services.api.test_sse import FakeWire, events, turn

EOS = 256
WORDS = Vocabulary([bytes([byte]) for byte in range(256)] + [b"</s>"], special=[EOS])
FACTS = ModelFacts("tiny", "llama", 257, 4096, (EOS,), 16, 10)
PROMPT = "hé 🙂"
HERMES = EXAMPLES["hermes"]
TEXTS = (
    HERMES,
    f"<think>Why?</think>\n{HERMES[:70]}",
    "<think>so",
    "plain ab\ntext",
    "ü€😀 ab ü",
    "",
    "a<tool_call>\nno",
)
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"guided_regex": "[a-z ]+"},
    {"structured_outputs": {"choice": ["plain ab", "so"]}},
)
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Run:
    """One request of whichever kind; `random` cuts what its choices say into batches."""

    def __init__(self, kind: str, fields: dict[str, Any], outputs: list[tuple[bytes, bool]], random: Random) -> None:
        self.kind, self.outputs, self.random = kind, outputs, random
        fields = {"prompt": PROMPT, **fields} if kind == "completion" else {"messages": [USER], **fields}
        body = json.dumps(fields).encode()
        self.asked: GenerationRequest
        if kind == "completion":
            made = completion.BODY.parse(body)
            self.asked, submits = made, completion.submits_of(made, FACTS, 8)
            wanted, echoes = None, [PROMPT] if made.echo else []
        else:
            asked = chat.BODY.parse(body)
            self.asked, submits = asked, chat.submits_of(asked, FACTS, 8)
            wanted, echoes = chat.wanted_of(asked), [chat.echo_of(asked)]
        self.box = Outbox(9, 0.0)
        self.streams = Streams(Lanes(lambda scheduler, message: True, lambda: [0], lambda: [0]))
        self.streams.speak(Formats(Dialects(TOOLS["hermes"], REASONING["think"]), WORDS))
        self.hub = Hub(Routes(0, 1), 100, lambda peer, message: True, Figures(), 30.0)
        self.request: Request = self.hub.open(
            submits, [Peer("tokenizer", 0, 9, "")], 0.0, 1000 * bool(self.asked.stream)
        )
        self.request.wanted, self.request.echoes, self.request.form = wanted, echoes, self.asked.form()
        first = self.request.choices[0]
        opened = self.streams.open(msgspec.structs.replace(first.submit, seq_id=first.seq_id), self.box)
        assert opened is not None
        self.streams.admit(opened, Prompt(array("i", list(PROMPT.encode()))), FACTS)

    def batches(self) -> Iterator[None]:
        """Each turn some choices get some of their tokens; the last ones come with their end or before it, one that
        ends the output with it."""
        report = self.request.choices[0].submit.sampling.report
        prompt = b"".join(record(token, report.prompt) for token in PROMPT.encode()[1:]) if report.prompt >= 0 else b""
        left = [[*text, *([EOS] if ends else [])] for text, ends in self.outputs]
        given = [0] * len(left)
        open_ = set(range(len(left)))
        while open_:
            rows, told, finished = [], dict[int, TokenLogprobs](), list[Finished]()
            for place in (
                sorted(open_) if prompt else self.random.sample(sorted(open_), self.random.randint(1, len(open_)))
            ):
                count = self.random.randint(0, min(5, len(left[place]) - given[place]))
                seq_id = self.request.choices[place].seq_id
                new = left[place][given[place] : given[place] + count]
                rows += [(seq_id, given[place] + ahead, token) for ahead, token in enumerate(new)]
                if report.asks:
                    drawn = new if report.top >= 0 else []
                    records = b"".join(record(token, report.top, report.named) for token in drawn)
                    told[seq_id] = TokenLogprobs(given[place], records, 1, b"" if place else prompt)
                given[place] += count
                ends = self.outputs[place][1]
                if given[place] == len(left[place]) and (ends or self.random.random() < 0.7):
                    open_.remove(place)
                    reason = FinishReason.EOS if ends else FinishReason.LENGTH
                    # nothing was cached: a stop string that comes before this ends without knowing
                    finished.append(Finished(seq_id, reason, EOS if ends else -1))
            prompt = b""
            columns = zip(*rows, strict=True) if rows else ((), (), ())
            seq_ids, index, tokens = columns
            batch = TokenBatch(pack_u64(seq_ids), pack_i32(index), pack_i32(tokens), finished, logprobs=told)
            self.streams.take(batch, 0)
            if self.random.random() < 0.7 or not open_:
                assert self.box.flush(lambda incarnation, message: self.hub.feed(message, 1.0) is None)
                self.hub.flush()
            yield

    def whole(self) -> dict[str, Any]:
        for _ in self.batches():
            pass
        assert not self.request.open and self.request.failure is None
        make: Any = completions.reply if self.kind == "completion" else chat_completions.reply
        reply: dict[str, Any] = json.loads(msgspec.json.encode(make("x", 5, "tiny", self.request)))
        return reply

    def stream(self) -> list[Any]:
        async def main() -> list[Any]:
            asked, wire = self.asked, FakeWire()
            chunks = Chunks(self.kind, "x", 5, "tiny", wants_usage(asked), continuous_usage(asked))
            stream = EventStream(self.request, self.hub, chunks, wire, wants_usage(asked))  # type: ignore[arg-type]

            async def receive() -> Any:
                raise AssertionError

            task = None
            for _ in self.batches():
                if task is None and stream.opened.done():
                    task = asyncio.create_task(stream({}, receive, wire.send))
                await turn()
            await (task or asyncio.create_task(stream({}, receive, wire.send)))
            return events(b"".join(wire.written))

        return asyncio.run(main())


USER, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}


def record(token: int, top: int, named: tuple[int, ...] = ()) -> bytes:
    ids = [token, *(named or ((token + ahead) % 256 for ahead in range(top)))]
    values = [-token / 64, *(-ahead - token / 64 for ahead in range(top))]
    return pack_i32([1 + token % 3, *ids]) + array("f", values).tobytes()


def of_whole(reply: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], Any, Any]:
    found = {}
    for choice in reply["choices"]:
        message, told = choice.get("message") or {"content": choice.get("text")}, choice["logprobs"] or {}
        found[choice["index"]] = {
            "text": message["content"] or "",
            "reasoning": message.get("reasoning_content", ""),
            "calls": [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])],
            "ids": choice.get("token_ids") or [],
            "ends": (choice["finish_reason"], choice["stop_reason"]),
            "logprobs": {name: told.get(name) or [] for name in (*COLUMNS, "content")},
        }
    prompts = reply.get("prompt_token_ids") or reply["choices"][0].get("prompt_token_ids")
    return found, reply["usage"], prompts


def of_stream(chunks: list[Any]) -> tuple[dict[int, dict[str, Any]], Any, Any]:
    found: dict[int, dict[str, Any]] = {}
    usage = prompts = None
    assert chunks[-1] == "[DONE]"
    for chunk in chunks[:-1]:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            empty = {name: [] for name in (*COLUMNS, "content")}
            blank = {"text": "", "reasoning": "", "calls": [], "ids": [], "ends": None, "logprobs": empty}
            mine, delta = found.setdefault(choice["index"], blank), choice.get("delta") or {}
            assert mine["ends"] is None, "news after the end"
            mine["text"] += delta.get("content") or choice.get("text") or ""
            mine["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(mine["calls"]):
                    mine["calls"].append((call["function"]["name"], ""))
                name, arguments = mine["calls"][call["index"]]
                mine["calls"][call["index"]] = name, arguments + call["function"]["arguments"]
            mine["ids"] += choice.get("token_ids") or []
            prompts = (chunk if "delta" in choice else choice).get("prompt_token_ids") or prompts
            for name, column in (choice.get("logprobs") or {}).items():
                if name in mine["logprobs"]:
                    mine["logprobs"][name] += column
            if choice["finish_reason"]:
                mine["ends"] = choice["finish_reason"], choice["stop_reason"]
    return found, usage, prompts


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from(["chat", "completion"]))
    fields: dict[str, Any] = {"n": draw(st.integers(1, 3)), "return_token_ids": draw(st.booleans())}
    fields["stop"] = draw(st.sampled_from([None, ["ab"], ["\n", "so"], ["</tool_call>"]]))
    fields["include_stop_str_in_output"] = draw(st.booleans())
    fields["skip_special_tokens"] = draw(st.booleans())
    fields["return_tokens_as_token_ids"] = draw(st.booleans())
    fields |= draw(st.sampled_from([{}, *GRAMMARS]))  # which only the worker enforces: what is said stays random here
    top = draw(st.sampled_from([None, 0, 2]))
    if kind == "completion":
        fields |= {"logprobs": top, "echo": draw(st.booleans()), "max_tokens": draw(st.sampled_from([0, 500, 500]))}
    else:
        fields |= {"logprobs": top is not None, "top_logprobs": top}
        fields["include_reasoning"] = draw(st.booleans())
        fields |= {"tools": draw(st.sampled_from([None, [WEATHER, TIME]])), "parallel_tool_calls": draw(st.booleans())}
        fields |= {"echo": draw(st.booleans()), "messages": draw(st.sampled_from([[USER], [USER, SAID]]))}
    if top is not None and fields.get("max_tokens") != 0:
        fields["logprob_token_ids"] = draw(st.sampled_from([None, [97], [200, 98, 5]]))
    return kind, fields


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    requests(),
    st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(0, 2), st.booleans()), min_size=3, max_size=3),
    st.integers(0, 2**32),
)
def test_field_by_field(asked: tuple[str, dict[str, Any]], said: list[tuple[str, int, bool]], seed: int) -> None:
    kind, fields = asked
    outputs = [(text.encode()[: len(text.encode()) - cut], ends) for text, cut, ends in said[: fields["n"]]]
    outputs = [(text or b"x", ends) for text, ends in outputs]
    if fields.get("max_tokens") == 0:
        outputs = [(b"x", False)] * fields["n"]
    whole = of_whole(Run(kind, fields, outputs, Random(seed)).whole())
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = of_stream(Run(kind, fields | options, outputs, Random(seed + 1)).stream())
    assert streamed == whole, (kind, fields, outputs)


def test_the_records_say_something() -> None:
    assert record(5, 2) != record(6, 2) and Report(2).asks
