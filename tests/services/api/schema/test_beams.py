import json
from typing import Any

import pytest

from common.errors import Reject
from common.protocol import ModelFacts
from common.text_format import Beams
from services.api.schema import chat, completion
from services.api.schema.logprobs import chosen

FACTS = ModelFacts("tiny", "llama", 1000, 128, (2,), 16, 64)


def asked(**fields: Any) -> completion.CompletionRequest:
    return completion.BODY.parse(json.dumps({"prompt": [1, 2], "use_beam_search": True} | fields).encode())


def beams_of(**fields: Any) -> Beams | None:
    (submit,) = completion.submits_of(asked(**fields), FACTS, 256)
    assert submit.options.beams is None or submit.n == submit.options.beams.width
    return submit.options.beams


def test_as_many_beams_as_outputs_or_best_of() -> None:
    assert beams_of() == Beams(1) and beams_of(n=3) == Beams(3) and beams_of(n=2, best_of=4) == Beams(4)
    assert beams_of(length_penalty=0.0, early_stopping=True) == Beams(1, 0.0, 1)
    assert beams_of(early_stopping="never", temperature=0, logprobs=2) == Beams(1, 1.0, 2)
    assert beams_of(use_beam_search=False, n=3) is None
    form = asked(n=2, best_of=4).form()
    assert (form.best, form.ordered) == (2, True)


def test_a_chat() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "n": 3}
    (submit,) = chat.submits_of(chat.BODY.parse(json.dumps(body).encode()), FACTS, 8)
    assert submit.options.beams == Beams(3) and submit.n == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 129}, "n"),
        ({"temperature": 0.5}, "temperature"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"guided_regex": "a+"}, "use_beam_search"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": "never"}, "early_stopping"),
    ],
)
def test_what_goes_with_none_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Reject) as caught:
        beams_of(**fields)
    assert caught.value.param == param


def test_the_first_outputs_are_the_best() -> None:
    class Of:
        form = asked(n=2, best_of=3).form()
        (submit,) = completion.submits_of(asked(n=2, best_of=3), FACTS, 256)

        def __init__(self) -> None:
            self.choices = [
                type("Choice", (), {"submit": self.submit, "reported": None, "at": at})() for at in range(3)
            ]

    assert [choice.at for choice in chosen(Of())] == [0, 1]  # type: ignore[arg-type, attr-defined]
