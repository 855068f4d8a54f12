import threading
from array import array
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from common import gguf_tokenizer, vocabulary
from common.columns import pack_i32
from common.constraints import ToolUse
from common.dialects import hermes, qwen3_coder, think
from common.dialects.registry import Dialects
from common.errors import Reject, RejectReason
from common.logprobs import Report
from common.pooling import Pooling
from common.protocol import Grammar, Options, PromptKind, Sampling, Submit, Tokenize, Words
from common.text_format import GOES_ON, REASONING
from common.text_format import TOOLS as CALLS
from common.vocabulary import Vocabulary
from services.tokenizer.chat import ChatTemplate
from services.tokenizer.encode import Encoder, fit, shortened
from services.tokenizer.source import Loaded

SAMPLING = Sampling(max_tokens=4)
HERMES, QWEN3_CODER, THINK = hermes.DIALECT, qwen3_coder.DIALECT, think.THINK
REASONING_AND_TOOLS = REASONING | CALLS


@pytest.fixture
def encoder(smollm: Tokenizer, smollm_words: Vocabulary, smollm_metadata: dict[str, Any]) -> Encoder:
    template = ChatTemplate(smollm_metadata["tokenizer.chat_template"], {})
    return Encoder(Loaded(smollm, smollm_words, template), 10_000)


def submit(kind: PromptKind, **fields: Any) -> Submit:
    return Submit(1, kind, SAMPLING, **fields)


def refusal(encoder: Encoder, message: Submit) -> Reject:
    with pytest.raises(Reject) as caught:
        encoder.prompt(message, 49152)
    return caught.value


def test_text_messages_and_tokens_become_ids(encoder: Encoder) -> None:
    assert list(encoder.prompt(submit(PromptKind.TEXT, text="<|im_start|>user\n"), 49152).tokens) == [1, 4093, 198]
    assert list(encoder.prompt(submit(PromptKind.TOKENS, tokens=pack_i32([5, 0, 49151])), 49152).tokens) == [
        5,
        0,
        49151,
    ]
    chat = encoder.prompt(submit(PromptKind.CHAT, messages=b'[{"role": "system", "content": "x"}]'), 49152).tokens
    assert list(chat[:3]) == [1, 9690, 198] and list(chat[-3:]) == [520, 9531, 198]


def test_a_rendered_chat_gets_no_second_bos(sentencepiece_metadata: dict[str, Any]) -> None:
    tokenizer = gguf_tokenizer.build(sentencepiece_metadata)
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    encoder = Encoder(Loaded(tokenizer, vocabulary.build(tokenizer), template), 100)
    bos = sentencepiece_metadata["tokenizer.ggml.bos_token_id"]
    assert list(encoder.prompt(submit(PromptKind.CHAT, messages=b'[{"content": "the"}]'), 500).tokens).count(bos) == 1
    assert list(encoder.prompt(submit(PromptKind.TEXT, text="the"), 500).tokens).count(bos) == 1
    for special in (True, False):  # whoever asks for one more gets it
        call = Tokenize(1, PromptKind.CHAT, messages=b'[{"content": "the"}]', add_special_tokens=special)
        assert list(encoder.tokenize(call).tokens).count(bos) == 1 + special


@pytest.mark.parametrize("tokens", [[49152], [-1], [1, 2**31 - 1]])
def test_ids_outside_the_vocabulary(encoder: Encoder, tokens: list[int]) -> None:
    fault = refusal(encoder, submit(PromptKind.TOKENS, tokens=pack_i32(tokens)))
    assert fault.reason == RejectReason.INVALID and fault.param == "prompt"
    assert str(tokens[-1]) in fault.message and "49151" in fault.message


def test_what_cannot_be_a_prompt(encoder: Encoder) -> None:
    assert "empty" in refusal(encoder, submit(PromptKind.TEXT)).message
    assert "empty" in refusal(encoder, submit(PromptKind.TOKENS)).message
    assert "32-bit" in refusal(encoder, submit(PromptKind.TOKENS, tokens=b"abc")).message
    assert "surrogate" in refusal(encoder, submit(PromptKind.TEXT, text="a\ud800")).message


def test_a_model_without_template(smollm: Tokenizer, smollm_words: Vocabulary) -> None:
    encoder = Encoder(Loaded(smollm, smollm_words, None, "no chat template here"), 100)
    fault = refusal(encoder, submit(PromptKind.CHAT, messages=b"[]"))
    assert (fault.reason, fault.message, fault.param) == (RejectReason.INVALID, "no chat template here", "messages")


def test_tokenize_and_detokenize(encoder: Encoder) -> None:
    encoded = encoder.tokenize(Tokenize(1, PromptKind.TEXT, text="hi 1"))
    assert encoded.strings == ["hi", "Ġ", "1"] and encoder.detokenize(encoded.tokens.tobytes()) == "hi 1"
    with_prompt = encoder.tokenize(Tokenize(1, PromptKind.CHAT, messages=b'[{"role": "system", "content": "x"}]'))
    assert with_prompt.strings[-3:] == ["ass", "istant", "Ċ"]
    call = Tokenize(1, PromptKind.CHAT, messages=b'[{"role": "system", "content": "x"}]', add_generation_prompt=False)
    assert "istant" not in encoder.tokenize(call).strings
    talk = b'[{"role": "user", "content": "x"}, {"role": "assistant", "content": "Sure,"}]'
    assert encoder.tokenize(Tokenize(1, PromptKind.CHAT, messages=talk, goes_on=True)).strings[-2:] == ["Sure", ","]
    assert len(encoder.tokenize(Tokenize(1, PromptKind.TEXT)).tokens) == 0
    with pytest.raises(Reject, match="already"):
        encoder.tokenize(Tokenize(1, PromptKind.TOKENS))
    with pytest.raises(Reject, match="outside"):
        encoder.detokenize(pack_i32([10**6]))


def test_lengths_that_fit() -> None:
    assert fit(10, Sampling(max_tokens=5), 15, "prompt") == 5
    assert fit(10, Sampling(max_tokens=0), 15, "prompt") == 5


def test_lengths_that_do_not_fit_name_every_number() -> None:
    with pytest.raises(Reject) as asked:
        fit(11, Sampling(max_tokens=5), 15, "messages")
    assert asked.value.reason == RejectReason.TOO_LONG and asked.value.param == "max_tokens"
    assert asked.value.message.startswith(
        "This model's maximum context length is 15 tokens. However, you requested 16 tokens "
        "(11 in the messages, 5 for the completion)."
    )
    assert "context_length_exceeded" in asked.value.message  # LangChain's ContextOverflowError
    with pytest.raises(
        Reject, match=r"maximum context length is 15 tokens.*resulted in 15 tokens.*context_length_exceeded"
    ):
        fit(15, Sampling(max_tokens=0), 15, "prompt")


def test_others_run_while_a_long_text_is_encoded(encoder: Encoder) -> None:
    """The interpreter lock is given back: threads take turns 50 times between the start and the end of one encode."""
    text = "A long prompt of many words, encoded in the pool. " * 10_000
    events: list[str] = []
    started = threading.Event()

    def encode() -> None:
        started.set()
        encoder.prompt(submit(PromptKind.TEXT, text=text), 49152)
        events.append("encoded")

    here, there = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(50):
            there.acquire()
            here.release()

    threads = [threading.Thread(target=encode), threading.Thread(target=answer)]
    for thread in threads:
        thread.start()
    started.wait()
    for _ in range(50):
        there.release()
        here.acquire()
    events.append("50 turns")
    for thread in threads:
        thread.join()
    assert events == ["50 turns", "encoded"]


def test_a_chat_ends_where_it_is_asked_to(encoder: Encoder) -> None:
    messages = b'[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The capital of "}]'
    ends = [
        encoder.detokenize(
            encoder.prompt(submit(PromptKind.CHAT, messages=messages, options=Options(end)), 49152).tokens.tobytes()
        )
        for end in range(3)
    ]
    assert ends[0].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert ends[1].endswith("The capital of <|im_end|>\n")
    assert ends[2].endswith("<|im_start|>assistant\nThe capital of ")


def test_a_message_that_the_template_does_not_show_cannot_go_on(smollm: Tokenizer, smollm_words: Vocabulary) -> None:
    encoder = Encoder(Loaded(smollm, smollm_words, ChatTemplate("{{ messages|length }}", {})), 100)
    message = submit(PromptKind.CHAT, messages=b'[{"content": "x"}]', options=Options(GOES_ON))
    assert refusal(encoder, message).param == "continue_final_message"
    assert refusal(encoder, submit(PromptKind.CHAT, messages=b"[]", options=Options(GOES_ON))).param == "messages"


def test_a_message_goes_on_wherever_its_words_stand(encoder: Encoder) -> None:
    for content in ("e", "im_end", "user", " "):
        messages = msgspec.json.encode([{"role": "assistant", "content": content}])
        prompt = encoder.prompt(submit(PromptKind.CHAT, messages=messages, options=Options(GOES_ON)), 49152).tokens
        assert encoder.detokenize(prompt.tobytes()).endswith(f"<|im_start|>assistant\n{content}")


TOOLS = msgspec.json.encode({"tools": [{"function": {"name": "f", "parameters": {"type": "object"}}}]})
GRAMMAR = Grammar("regex", "[0-9]+", "guided_regex")


def test_the_grammar_of_a_whole_answer(encoder: Encoder, smollm: Tokenizer, smollm_words: Vocabulary) -> None:
    thinking = Encoder(
        Loaded(smollm, smollm_words, ChatTemplate("{{ messages[0].content }}", {}), dialects=Dialects(HERMES, THINK)),
        100,
    )

    def grammar_of(content: str, which: Encoder = thinking, end: int = 0, **more: Any) -> str | None:
        messages = msgspec.json.encode([{"role": "user", "content": content}])
        use = more.pop("use", None)
        asked = submit(PromptKind.CHAT, messages=messages, options=Options(end, calls=use), **more)
        found = which.prompt(msgspec.structs.replace(asked, sampling=Sampling(4, grammar=GRAMMAR)), 49152).grammar
        return None if found is None else found.text

    assert encoder.prompt(submit(PromptKind.TEXT, text="x"), 49152).grammar is None
    assert grammar_of("x") == grammar_of("x", encoder, parts=REASONING) == GRAMMAR.text
    begun, closed, may = (grammar_of(text, parts=REASONING) for text in ("x<think>\n", "<think></think>\n", "x"))
    assert begun and "</think>" in begun and "<think>" not in begun
    assert closed == GRAMMAR.text and may and '"<think>"' in may
    assert grammar_of("x", end=GOES_ON, parts=REASONING) == GRAMMAR.text
    called = grammar_of("x", parts=REASONING_AND_TOOLS, template_kwargs=TOOLS, use=ToolUse(("f",), must=True))
    assert called and '\\"name\\": \\"f\\"' in called and GRAMMAR.text not in called
    only = Sampling(4, words=Words((5, 6)))
    messages = b'[{"role": "user", "content": "x"}]'
    options = Options(calls=ToolUse(("f",), must=True))
    called_so = Submit(1, PromptKind.CHAT, only, messages=messages, template_kwargs=TOOLS, options=options)
    narrow = msgspec.structs.replace(called_so, parts=REASONING_AND_TOOLS)
    assert refusal(thinking, narrow).param == "allowed_token_ids"

    def long(*strict: str) -> str:
        schema = {"type": "object", "properties": {"a": {"enum": ["x" * 1000] * 100}}}
        tools = msgspec.json.encode({"tools": [{"function": {"name": name, "parameters": schema}} for name in "abc"]})
        use = ToolUse(("a", "b", "c"), strict, must=True)
        return str(grammar_of("x", parts=REASONING_AND_TOOLS, template_kwargs=tools, use=use))

    assert len(long()) < 2000 < 100_000 < len(long("b")) < 120_000


def test_tools_that_cannot_be_enforced_are_refused(smollm: Tokenizer, smollm_words: Vocabulary) -> None:
    template = ChatTemplate("x", {})
    encoder = Encoder(Loaded(smollm, smollm_words, template, dialects=Dialects(QWEN3_CODER, None)), 100)
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}
    tools = msgspec.json.encode({"tools": [{"function": {"name": "f", "parameters": schema}}]})
    use = ToolUse(("f",), strict=("f",))
    asked = submit(
        PromptKind.CHAT,
        messages=b'[{"role": "user", "content": "x"}]',
        template_kwargs=tools,
        options=Options(calls=use),
    )
    assert refusal(encoder, msgspec.structs.replace(asked, parts=REASONING_AND_TOOLS)).param == "tools"


def test_the_last_tokens_of_a_prompt() -> None:
    tokens = array("i", range(10))
    for keep, length in ((0, 10), (3, 3), (20, 10), (-1, 4)):
        kept = shortened(tokens, submit(PromptKind.TEXT, options=Options(keep_tokens=keep)), 8)
        assert list(kept) == list(range(10))[-length:]


POOLED = Sampling(0, report=Report(pooling=Pooling()))


def test_a_prompt_that_is_pooled_keeps_its_first_tokens_and_the_tokenizer_s_end() -> None:
    tokens = array("i", range(10))
    for keep, tail, left in (
        (3, 0, [0, 1, 2]),
        (3, 1, [0, 1, 9]),
        (1, 2, [9]),
        (-1, 0, [*range(8)]),
        (0, 1, [*range(10)]),
    ):
        asked = Submit(1, PromptKind.TEXT, POOLED, options=Options(keep_tokens=keep))
        assert list(shortened(tokens, asked, 8, tail)) == left


def test_a_prompt_that_is_pooled_leaves_no_room_for_tokens() -> None:
    assert fit(8, POOLED, 8, "prompt") == fit(1, POOLED, 8, "prompt") == 0
    with pytest.raises(Reject) as caught:
        fit(9, POOLED, 8, "prompt")
    assert caught.value.reason is RejectReason.TOO_LONG


def test_special_tokens_around_a_text(smollm: Tokenizer, smollm_words: Vocabulary) -> None:
    """As tokenizers of embedding models put them there."""
    tokenizer = Tokenizer.from_str(smollm.to_str())
    ends = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    tokenizer.post_processor = ends
    encoder = Encoder(Loaded(tokenizer, smollm_words, None), 100)
    made = encoder.prompt(Submit(1, PromptKind.TEXT, POOLED, text="hi there"), 49152)
    assert (made.tokens[0], made.tokens[-1], made.tail) == (1, 2, 1)
    plain = encoder.prompt(Submit(1, PromptKind.TEXT, POOLED, text="hi there", options=Options(plain=True)), 49152)
    assert (plain.tokens, plain.tail) == (made.tokens[1:-1], 0)


def test_the_prompt_of_a_request_that_is_not_run(encoder: Encoder) -> None:
    messages = b'[{"role": "user", "content": "hi"}]'
    asked = submit(PromptKind.CHAT, messages=messages, options=Options(keep_tokens=3))
    whole = encoder.prompt(asked, 49152)
    told = encoder.tokenize(Tokenize(1, PromptKind.CHAT, submit=asked), 100)
    assert told.tokens == whole.tokens[-3:] and len(whole.tokens) > 3 and told.strings == []


def test_bad_words_are_banned_in_both_places_that_they_may_have(encoder: Encoder, smollm: Tokenizer) -> None:
    submit = Submit(0, PromptKind.TEXT, Sampling(5), text="hi", options=Options(bad_words=("Paris", "Paris", "a b")))
    made = encoder.prompt(submit, 49152)
    texts = ("Paris", " Paris", "a b", " a b")
    assert made.banned == tuple(tuple(smollm.encode(text, add_special_tokens=False).ids) for text in texts)
    assert list(made.tokens) == smollm.encode("hi").ids


def test_a_suffix_needs_tokens_for_it(encoder: Encoder) -> None:
    with pytest.raises(Reject) as caught:
        encoder.prompt(Submit(0, PromptKind.TEXT, Sampling(5), text="hi", options=Options(suffix="y")), 49152)
    assert caught.value.param == "suffix"


def test_what_stands_between_is_filled_in(smollm_metadata: dict[str, Any]) -> None:
    tokenizer = gguf_tokenizer.build(smollm_metadata)
    tokenizer.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    own = Encoder(Loaded(tokenizer, vocabulary.build(tokenizer), None, "none"), 100)
    made = own.prompt(Submit(0, PromptKind.TEXT, Sampling(5), text="a(", options=Options(suffix=")")), 50_000)
    assert tokenizer.decode(list(made.tokens), False) == "<|fim_prefix|>a(<|fim_suffix|>)<|fim_middle|>"
