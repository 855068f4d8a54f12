import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from common.errors import Reject, RejectReason
from services.tokenizer.renderer import Renderer

HI = json.dumps([{"role": "user", "content": "hi"}]).encode()
# Does what its first message says.
DOES = """
{%- set word = messages[0].content -%}
{%- if word == "loop" -%}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif word == "grow" -%}{% set n = namespace(x="a") %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}
{%- elif word == "power" -%}{% set e = messages|length * 9 %}{{ e ** (e ** (e + 1)) }}
{%- else -%}{{ word }}{%- endif -%}
"""


def words(word: str) -> bytes:
    return json.dumps([{"role": "user", "content": word}]).encode()


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(DOES, {}, "with tools", cpu_s=0.3)
    yield renderer
    renderer.close()


def refused(renderer: Renderer, word: str) -> str:
    with pytest.raises(Reject) as caught:
        renderer.render(words(word), b"", True, 1000)
    assert (caught.value.reason, caught.value.param) == (RejectReason.INVALID, "messages")
    return caught.value.message


def test_it_renders_as_the_template_in_this_process(renderer: Renderer) -> None:
    assert renderer.render(words("grüße"), b"", True, 1000) == "grüße"
    assert renderer.render(words("x"), b'{"tools": [1]}', True, 1000) == "with tools"


def test_what_the_template_refuses_keeps_its_reason_and_field(renderer: Renderer) -> None:
    with pytest.raises(Reject, match="longer than 3 characters") as caught:
        renderer.render(words("xxxx"), b"", True, 3)
    assert caught.value.reason is RejectReason.TOO_LONG
    with pytest.raises(Reject, match="cannot be a template argument") as caught:
        renderer.render(HI, b'{"messages": 1}', True, 3)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("word", ["loop", "power"])
def test_what_does_not_end_is_ended_and_the_next_call_is_served(renderer: Renderer, word: str) -> None:
    assert "processor time" in refused(renderer, word)
    assert renderer.render(words("next"), b"", True, 1000) == "next"


def test_what_grows_without_end_runs_out_of_memory_elsewhere(renderer: Renderer) -> None:
    before = psutil.Process().memory_info().rss
    refused(renderer, "grow")
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert renderer.render(words("next"), b"", True, 1000) == "next"


def test_other_threads_are_served_while_one_waits(renderer: Renderer) -> None:
    ended = threading.Event()

    def endless() -> None:
        refused(renderer, "loop")
        ended.set()

    thread = threading.Thread(target=endless)
    thread.start()
    count = 0
    while not ended.is_set():
        assert renderer.render(words("meanwhile"), b"", True, 1000) == "meanwhile"
        count += 1
    thread.join()
    assert count > 1


def test_a_killed_child_costs_nobody_anything() -> None:
    with contextlib.closing(Renderer(DOES, {})) as renderer:
        killed_children(renderer)


def test_without_descriptors_a_request_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Renderer(DOES, {})) as renderer:
        killed(renderer._children.pids())

        def fail(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(subprocess, "Popen", fail)
        with pytest.raises(Reject, match="Too many open files") as caught:
            renderer.render(HI, b"", True, 1000)
        assert caught.value.reason is RejectReason.UNAVAILABLE


def killed(pids: list[int]) -> None:
    for pid in pids:
        process = psutil.Process(pid)
        process.kill()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(5)


def killed_children(renderer: Renderer) -> None:
    renderer.render(HI, b"", True, 1000)
    killed(renderer._children.pids())
    assert renderer.render(HI, b"", True, 1000) == "hi"


@pytest.mark.parametrize("source", ["{% for %}", "{{ 9 ** (9 ** 9) }}", "{{ 'a' * 10 ** 10 }}"])
def test_a_template_that_cannot_be_compiled_within_its_limits_is_refused(source: str) -> None:
    with pytest.raises(Reject) as caught, contextlib.closing(Renderer(source, {}, cpu_s=0.3)) as renderer:
        renderer.render(HI, b"", True, 1000)
    assert caught.value.reason is RejectReason.INVALID


def test_children_end_with_it_and_know_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALENCE_API_KEYS", "vl-secret")
    renderer = Renderer("x", {})
    [pid] = renderer._children.pids()
    process = psutil.Process(pid)
    assert "vl-secret" not in str(process.environ())
    assert os.getsid(process.pid) == process.pid  # a Ctrl-C in the terminal is not for it
    renderer.close()
    assert not psutil.pid_exists(process.pid) or process.status() == psutil.STATUS_ZOMBIE
    with pytest.raises(Reject, match="shutting down"):
        renderer.render(HI, b"", True, 10)


def test_close_ends_a_call_under_way() -> None:
    renderer = Renderer(DOES, {}, cpu_s=60.0)
    found: list[Reject] = []

    def call() -> None:
        with pytest.raises(Reject) as caught:
            renderer.render(words("loop"), b"", True, 10)
        found.append(caught.value)

    thread = threading.Thread(target=call)
    thread.start()
    [pid] = renderer._children.pids()
    while psutil.Process(pid).cpu_times().user < 0.2:
        time.sleep(0.01)
    renderer.close()
    thread.join(240)
    assert [reject.reason for reject in found] == [RejectReason.UNAVAILABLE]


@pytest.mark.parametrize("word", ["hi", "loop"])
def test_a_child_outlives_no_killed_tokenizer(word: str) -> None:
    """Idle it sees the end of its socket; busy it has its processor time left, and no more."""
    code = (
        "from services.tokenizer.renderer import Renderer\n"
        f"renderer = Renderer({DOES!r}, {{}}, cpu_s=2.0)\n"
        "[pid] = renderer._children.pids()\n"
        "print(pid, flush=True)\n"
        f"renderer.render({words(word)!r}, b'', True, 100)\n"
        "input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=240)
