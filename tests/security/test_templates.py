"""Chat templates of a hostile checkpoint, and messages that make one work: bounded, told, and others are served."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.system import System
from common.errors import Reject
from services.tokenizer.chat import ChatTemplate
from tests.security import checkpoints

HOSTILE = """
{%- set word = messages[0].content -%}
{%- if word == "loop" -%}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif word == "grow" -%}{% set n = namespace(x="a") %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}
{%- elif word == "range" -%}{% for i in range(10 ** 12) %}{% endfor %}
{%- elif word == "repeat" -%}{{ "x" * 10 ** (8 + messages|length) }}
{%- elif word == "format" -%}{{ "%0*d" % (10 ** 9, 1) }}
{%- elif word == "recursion" -%}{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}
{%- elif word == "output" -%}{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxx{% endfor %}{% endfor %}
{%- elif word == "escape" -%}{{ ().__class__.__base__.__subclasses__() }}
{%- elif word == "raise" -%}{{ raise_exception("not like this") }}
{%- else -%}{{ word }}{%- endif -%}
"""
WORDS = ["loop", "grow", "range", "repeat", "format", "recursion", "output", "raise"]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    model = checkpoints.make(tmp_path_factory.mktemp("hostile") / "model", HOSTILE)
    with System("worker.kind=null", f"model.source={model}", "tokenizer.max_template_s=1") as system:
        yield system


def chat(system: System, word: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": word}], "max_tokens": 2}
    return httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=120)


def tokenizers(system: System) -> list[int]:
    return [entry["pid"] for entry in system.status()["processes"] if entry["service"] == "tokenizer"]


@pytest.mark.parametrize("word", WORDS)
def test_each_attack_ends_in_an_error_of_its_own_request(system: System, word: str) -> None:
    before = tokenizers(system)
    answer = chat(system, word)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "messages"
    assert "template" in answer.json()["error"]["message"] or "longer than" in answer.json()["error"]["message"]
    assert chat(system, "hello").status_code == 200
    assert tokenizers(system) == before


def test_an_escape_reaches_nothing(system: System) -> None:
    assert chat(system, "escape").status_code == 400


def test_others_are_served_while_one_template_does_not_end(system: System) -> None:
    """Some requests both begin and end while one template runs."""
    over = threading.Event()
    statuses: list[int] = []  # of the attacks that have ended; one after the other, so one always runs

    def attack() -> None:
        while not over.is_set():
            statuses.append(chat(system, "loop").status_code)

    thread = threading.Thread(target=attack)
    thread.start()
    served = 0
    try:
        while served < 4:
            ended = len(statuses)
            body = {"prompt": "hello", "max_tokens": 2}
            assert httpx.post(f"{system.url}/v1/completions", json=body, timeout=120).status_code == 200
            served += len(statuses) == ended
            assert len(statuses) < 6, f"{served} requests were served beside {len(statuses)} attacks"
    finally:
        over.set()
        thread.join()
    assert set(statuses) == {400}


def test_a_request_brings_no_template_of_its_own(system: System) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}
    answer = httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}}
    assert httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=60).status_code == 400


TRICKS = [
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception['__globals__'] }}",
    "{{ strftime_now.__func__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ '{0.__class__.__base__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ ('%s'|format)('x').__class__ }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__base__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as p %}",
    "{% extends '/etc/passwd' %}",
    "{{ import('os') }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ eval('1') }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ loop.__class__ }}{% for x in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% set g = (messages|map('upper')) %}{{ g.gi_frame.f_globals }}",
    "{{ caller.__code__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{{ messages|tojson(default=1) }}",
]


@pytest.mark.parametrize("source", TRICKS, ids=range(len(TRICKS)))
def test_a_trick_is_refused_or_shows_nothing(source: str) -> None:
    messages = json.dumps([{"role": "user", "content": "x"}]).encode()
    try:
        text = ChatTemplate(source, {}).render(messages, b"", True, 10_000)
    except Reject:
        return
    assert text.strip() == "" or ("<class" not in text and "root:" not in text and "uid=" not in text)
    assert "module" not in text and "function" not in text, text


def test_templates_know_no_files() -> None:
    with pytest.raises(Reject):
        ChatTemplate("{% include 'x' %}", {}).render(b"[]", b"", True, 10)
    assert not Path("x").exists()
